"""Checks answers to many JSON schemas: each is valid and equals masked plain decoding, whatever drafts.

    pip download --no-deps --no-binary :all: jsonschema    # its json/tests/draft2020-12 is the public test suite
    python benchmarks/schemas.py --suite json/tests/draft2020-12 --tools tool_calls.jsonl.gz

Schemas are those of the suite, those of the models of the ``openai`` package, and those of calls of the tools that the
first message of a chat in ``--tools`` describes. Schemas that llguidance refuses are counted. For every other schema
the pair, in float32, answers greedily with draft lengths 0, 1, 4 and auto, and also with history. Each answer must
equal the answer of the target alone: one token a pass, the likeliest of the tokens that the grammar allows. Answers
that end by themselves are validated against their schema by another library. Exits with 1 if an answer differs or is
not valid.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import io
import itertools
import json
import pkgutil
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai.types
import pydantic
import torch
from rich.console import Console

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammar, json_schema
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams
from cli.opened import open_pair

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Case:
    """A schema, its source, and the question to answer."""

    source: str
    name: str
    schema: Any
    question: str


@dataclass
class Found:
    """Results of one source; ``ended``: answers that ended by themselves."""

    refused: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    ended: int = 0
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    """Run the checks, print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="folder of the test suite's files")
    parser.add_argument("--tools", type=Path, help="chats, a line of JSON each, gzipped")
    parser.add_argument("--models", type=int, default=100, help="of the openai package")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    cases = [*models(options.models)]
    cases += [] if options.suite is None else suite(options.suite)
    cases += [] if options.tools is None else tools(options.tools)
    found: dict[str, Found] = {}
    with (
        tempfile.TemporaryDirectory() as home,  # the user's own state is not for tests
        open_pair(load_settings({"dtype": "float32", "home": Path(home)}), Console(file=io.StringIO())) as opened,
    ):
        for case in cases:
            check(opened.assistant, case, options.tokens, found.setdefault(case.source, Found()))
    for source, one in found.items():
        print(
            f"{source}: {one.cases} schemas answered the same by all, {one.ended} answers ended by themselves and are "
            f"valid, {one.refused.total()} schemas refused, {len(one.wrong)} wrong"
        )
        for reason, count in one.refused.most_common():
            print(f"    refused {count}: {reason}")
        for wrong in one.wrong:
            print(f"    WRONG {wrong}")
    raise SystemExit(any(one.wrong for one in found.values()))


def suite(folder: Path) -> Iterator[Case]:
    """Every schema of the suite's files."""
    for file in sorted(folder.glob("*.json")):
        for test in json.loads(file.read_text(encoding="utf-8")):
            question = f"Give an example as JSON: {test['description']}"
            yield Case("the JSON schema test suite", f"{file.stem}: {test['description']}", test["schema"], question)


def models(most: int) -> Iterator[Case]:
    """At most ``most`` of the models that the ``openai`` package sends and receives, evenly spread over it."""
    known: dict[str, type[pydantic.BaseModel]] = {}
    for module in pkgutil.walk_packages(openai.types.__path__, "openai.types."):
        for one in vars(importlib.import_module(module.name)).values():
            if isinstance(one, type) and issubclass(one, pydantic.BaseModel) and one.model_fields:
                known[f"{one.__module__}.{one.__name__}"] = one
    names = sorted(known)
    for name in names[:: max(1, len(names) // most)][:most] if most else []:
        schema = known[name].model_json_schema()
        yield Case(
            "models of the openai package", name, schema, f"Give an example of a {known[name].__name__} as JSON."
        )


def tools(file: Path) -> Iterator[Case]:
    """Calls of each tool that is described, and calls of either of two of them."""
    described: dict[str, tuple[dict[str, Any], str]] = {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            asked = json.loads(line)["messages"][0]["content"]
            said = re.search(r"^toolformer access: (\w+)\n(.+)\n(\w+)\((\w+)\)$", asked, re.MULTILINE)
            if said and said[1] == said[3]:
                described.setdefault(said[1], (_call(said[1], said[2], said[4]), asked))
    for name, (schema, asked) in described.items():
        yield Case("calls of tools", name, schema, asked)
    for (one, (first, asked)), (other, (second, _)) in itertools.combinations(described.items(), 2):
        yield Case("calls of tools", f"{one} or {other}", {"anyOf": [first, second]}, asked)


def _call(name: str, description: str, parameter: str) -> dict[str, Any]:
    arguments = _object({parameter: {"type": "string", "description": description}})
    return _object({"name": {"const": name}, "arguments": arguments})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


def check(assistant: Assistant, case: Case, tokens: int, found: Found) -> None:
    """Answer one case in every way, and compare the answers with one another and with the schema."""
    try:
        grammar = json_schema(case.schema)
        assistant.grammars.compile(grammar)
    except AdaptiveError as error:
        found.refused[_kind(str(error))] += 1
        return
    found.cases += 1
    messages = [Message("user", case.question)]
    wanted = plainly(assistant, encode_chat(assistant.pair, messages), grammar, tokens)
    ways: dict[str, LengthPolicy] = {f"length {count}": FixedLength(count) for count in (0, 1, 4)}
    ways |= {"auto": GoodputLength(), "with history": assistant.policy, "with history again": assistant.policy}
    kept, history = assistant.policy, assistant.history
    for name, policy in ways.items():
        assistant.policy = policy
        assistant.history = history if "history" in name else None
        for _ in assistant.chat(messages, GREEDY, StopParams(tokens), grammar=grammar, record=False):
            pass
        assert assistant.last is not None
        if assistant.last.output != wanted:
            found.wrong.append(f"{case.name} ({name}): another text than the target's own")
    assistant.policy, assistant.history = kept, history
    assert assistant.last is not None
    if assistant.last.finish_reason == "stop":
        found.ended += 1
        if not jsonschema_rs.validator_for(case.schema).is_valid(json.loads(assistant.last.text)):
            found.wrong.append(f"{case.name}: not valid: {assistant.last.text[:200]}")


def _kind(said: str) -> str:
    """The reason why a schema was refused, without the schema's own names, so that reasons can be counted."""
    reason = re.sub(r"/.*/|'[^']*'|\d+", "...", said.split("cannot be used: ")[-1])
    keys = re.search(r'Unimplemented keys: \["([^"]+)', reason)
    return f"{keys[1]} is not known" if keys else reason[:60]


def plainly(assistant: Assistant, prompt: list[int], grammar: Grammar, tokens: int) -> list[int]:
    """The answer of the target alone: token by token the likeliest of the tokens that the grammar allows."""
    constraint, sequence = assistant.grammars.constraint(grammar), assistant.pair.target.sequence()
    said: list[int] = []
    fed = prompt
    while len(said) < min(tokens, assistant.pair.target.context_length - len(prompt)):
        logits = torch.as_tensor(sequence.extend(fed, 1))
        fed = [int(constraint.mask(logits, []).argmax())]
        said += fed
        if fed[0] in assistant.pair.target.end_tokens | {assistant.pair.tokenizer.eos_token_id}:
            break
        constraint.commit(fed)
    return said


if __name__ == "__main__":
    main()
