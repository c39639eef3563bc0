"""Measures the cost of output formats and the gain of forced tokens: tokens per second with a format over without.

    python benchmarks/constrained.py --target ... --draft ... --tokens 100 --rounds 3

The same prompts are answered without a format and with several, in turns whose order changes. The formats: any JSON
object, long texts in a few fields, and many fields with long names and few choices. Prints for each format tokens per
second over all prompts, the share of tokens that the grammar forced, and the median over the rounds of its speed over
the speed without a format.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from served import prompts

from adaptive.assistant import Assistant
from adaptive.grammar import Grammar, json_schema
from adaptive.settings import load_settings
from adaptive.types import GRAMMAR, Message, SamplingParams, StopParams
from cli.opened import open_pair

FREE = "without"
# Required speed with a format, as a share of the speed without.
LEAST = 0.9


def schema_of(**properties: object) -> Grammar:
    """The grammar of an object with exactly these properties, all of them required."""
    return json_schema(
        {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    )


LINES = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 20}
CHOICE = {"enum": ["yes", "no", "not applicable"]}
FIELDS = (
    "customer_identification_number", "shipping_address_confirmed", "payment_method_authorised", "warranty_registered",
    "newsletter_subscription", "delivery_instructions_present", "invoice_address_is_shipping_address", "gift_wrapping",
)  # fmt: skip
FORMATS: dict[str, Grammar | None] = {
    FREE: None,
    "any object": json_schema({"type": "object"}),
    "long texts in fields": schema_of(summary={"type": "string", "minLength": 60}, steps=LINES),
    "names and choices": schema_of(**{f"{name}_{n}": CHOICE for n in range(4) for name in FIELDS}),
}


@dataclass
class Sum:
    """Totals over answers: tokens after the first one, their seconds, and accepted tokens that the grammar proposed."""

    tokens: int = 0
    seconds: float = 0.0
    forced: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def main() -> None:
    """Run the benchmark, print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-length", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kind", default="tools", help="of the bundled prompts")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    names = ("target", "draft", "dtype", "threads", "draft_length")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    texts = prompts(options.kind, options.prompts)
    rounds: list[dict[str, Sum]] = []
    with (
        tempfile.TemporaryDirectory() as home,  # what the user's own state knows would change the speeds
        open_pair(load_settings({**given, "home": Path(home)}), Console(file=io.StringIO())) as opened,
    ):
        for number in range(options.rounds + 1):  # the first is not counted: it warms up the policy and the machine
            sums = {name: Sum() for name in FORMATS}
            for place, text in enumerate(texts):
                order = list(FORMATS.items())
                for name, grammar in order if (number + place) % 2 else reversed(order):
                    sampling = SamplingParams(temperature=options.temperature, seed=number)
                    answer(opened.assistant, f"{number}. {text}", sampling, grammar, options.tokens, sums[name])
            rounds += [sums] if number else []
    for name in FORMATS:
        every = [sums[name] for sums in rounds]
        tokens = sum(one.tokens for one in every)
        ratio = statistics.median(sums[name].rate / sums[FREE].rate for sums in rounds)
        print(
            f"{name}: {tokens / sum(one.seconds for one in every):.1f} tokens/s over {tokens} tokens, "
            f"{sum(one.forced for one in every) / tokens:.0%} of them forced; {ratio:.2f} times the speed without"
            + ("" if name == FREE else f" (asked for: {LEAST})")
        )


def answer(
    assistant: Assistant, text: str, sampling: SamplingParams, grammar: Grammar | None, tokens: int, into: Sum
) -> None:
    """Answer one prompt and add its figures to ``into``."""
    stop = StopParams(tokens, ignore_eos=grammar is None)
    for _ in assistant.chat([Message("user", text)], sampling, stop, grammar=grammar, record=False):
        pass
    said = assistant.last
    assert said is not None
    into.tokens += len(said.output) - 1
    into.seconds += said.timings.predicted_s
    into.forced += sum(one.accepted for one in said.rounds if one.drafter == GRAMMAR)


if __name__ == "__main__":
    main()
