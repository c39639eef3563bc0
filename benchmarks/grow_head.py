"""Trains a head from scratch on a stream of real answers, and for comparison distills the separate draft on the same.

    python benchmarks/grow_head.py --cache DIR [--kind math] [--generations 100,300,1000] [--head unroll=3] [--draft ""]

In:  prompts by kind; the target answers each once (``streams.py``) and provides its hidden states of the answers.
Out: after each number of generations, on held-out prompts: acceptance by step of the draft, tokens a round at length
     4 (both by replay, which is exact), processor seconds of training on one thread, and the share of repeated 8-grams.

The head continues from one number of generations to the next, as training runs do; the draft's adapter starts afresh,
as its training runs do. Both keep the weights that are best on a tenth of the generations. ``--exact`` trains on the
original hidden states instead of those of the spool, which have 8 bits. With ``--keep`` and ``--json`` the same command
goes on where an earlier one ended: what stands in the file is not trained again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adaptation import as_examples, recipe_of
from safetensors.torch import load_file
from streams import answers_of, folder_of, stream
from transformers import PreTrainedModel

from adaptive.engines.head.module import Head
from adaptive.engines.head.parts import parts_of_folder
from adaptive.pair import BUNDLED, load_draft_for_training, sources
from adaptive.records.features import Features, FeatureSpool, tokens_hash
from adaptive.settings import Settings
from trainers import lora
from trainers.dataset import Example
from trainers.fit import fit
from trainers.recipe import Recipe
from trainers.replay import Replay, acceptance_rate, mean_acceptance_length
from trainers.students import Draft, HeadStudent, Student

LENGTH = 4


class Exact(Features):
    """Hidden states that were not rounded to 8 bits: ``values`` are float16."""

    def states(self) -> Any:
        """See ``Features.states``."""
        return self.values.astype(np.float32)


def with_features(examples: Sequence[Example], folder: Path, target: str, exact: bool) -> list[Example]:
    """The examples with the target's hidden states. Unless ``exact``, ``folder`` caches the states."""
    spool = FeatureSpool(folder / "features", 1 << 40)
    model: Any = None
    found = []
    for example in examples:
        tokens = tokens_hash(example.prompt, example.output)
        number = int(tokens[:12], 16)
        features = None if exact else spool.read(number, tokens)
        if features is None:
            model = model or _target(target)
            states = _states(model, example)
            features = (
                Exact(0, states.astype(np.float16), np.zeros((0, 0), np.float16)) if exact else Features.of(states)
            )
            if not exact:
                spool.write(number, tokens, features)
        found.append(replace(example, features=features))
    return found


def _target(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _states(model: Any, example: Example) -> Any:
    """Hidden states (n - 1, width) before the final norm."""
    seen: list[torch.Tensor] = []
    handle = model.get_decoder().norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    text = np.concatenate([example.prompt, example.output[:-1]])
    with torch.inference_mode():
        model.get_decoder()(torch.from_numpy(text).long()[None])
    handle.remove()
    return seen[0][0].float().numpy()


def by_step(replays: Sequence[Replay]) -> list[float]:
    """Mean acceptance at each step of a draft, whether it is reached or not."""
    return [float(row) for row in np.concatenate([r.acceptance for r in replays], axis=1).mean(1)]


def grown(
    student: Student, said: Sequence[Example], held: Sequence[Example], recipe: Recipe, folder: Path | None = None
) -> dict[str, Any]:
    """Train on ``said``, keep the weights that are best on a tenth of it, and replay ``held``. ``folder``: where to
    write them."""
    validation = max(4, len(said) // 10)
    began = time.process_time()
    result = fit(student, said[:-validation], lambda _: acceptance_rate(student.replay(said[-validation:])), recipe)
    seconds = time.process_time() - began
    assert result.best is not None
    student.restore(result.best)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        student.write(result.best, folder)
    replays = student.replay(held)
    return {
        "acceptance": acceptance_rate(replays),
        "by_step": by_step(replays),
        "tokens_a_round": mean_acceptance_length(replays, LENGTH),
        "cpu_s": seconds,
        "steps": result.steps,
        "best_step": result.best_step,
    }


def main() -> None:
    """Train, and print one line for each number of generations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=BUNDLED / "prompts", help="folder of <kind>.jsonl")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the target's answers, made once")
    parser.add_argument("--kind", default="math")
    parser.add_argument("--generations", default="100,300,1000")
    parser.add_argument("--then", metavar="KIND:N", help="at last N of another kind; the log then holds both")
    parser.add_argument("--answers", type=int, default=4, help="answers to each prompt, with different seeds")
    parser.add_argument("--set-aside", type=int, default=64, help="prompts that never come")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--head", action="append", help="fields of Recipe, e.g. unroll=2 (repeatable); none trains none"
    )
    parser.add_argument("--draft", action="append", help="the same for the separate draft; none trains none")
    parser.add_argument("--fresh", action="store_true", help="the head, too, starts afresh each time")
    parser.add_argument("--exact", action="store_true", help="hidden states that are not rounded to 8 bits")
    parser.add_argument("--keep", type=Path, help="folder for the weights after each number of generations")
    parser.add_argument("--json", type=Path, help="append one object a line")
    args = parser.parse_args()

    torch.set_num_threads(1)
    settings = Settings(device="cpu", max_new_tokens=args.max_new_tokens)
    target = sources(settings)[0].folder
    numbers = [int(part) for part in args.generations.split(",")]

    def examples_of(kind: str, count: int) -> tuple[list[Example], list[Example], float]:
        """What is learned from, what is held out, and the share of its 8-grams that are repeated."""
        answers = answers_of(kind, settings, args.prompts, args.cache, args.temperature, args.answers)
        given = stream(f"stationary:{kind}", {kind: answers}, count, args.set_aside, args.seed)
        folder = folder_of(kind, settings, args.prompts, args.cache, args.temperature)
        said, held = (
            with_features(as_examples(g), folder, str(target), args.exact)
            for g in (given.generations, given.held_out[kind])
        )
        return said, held, _repeated(given.held_out[kind])

    said, held, repeated = examples_of(args.kind, numbers[-1])
    later: list[Example] = []
    if args.then is not None:
        other, _, count = args.then.partition(":")
        later, later_held, _ = examples_of(other, int(count))
        numbers.append(len(said) + len(later))
    lines = args.json.read_text().splitlines() if args.keep and args.json and args.json.is_file() else []
    done = set(map(_key, map(json.loads, lines)))
    runs = [("head", text) for text in args.head or [""]] + [("draft", text) for text in args.draft or [""]]
    for who, text in runs:
        if text == "none":
            continue
        _, recipe = recipe_of(text, args.seed, LENGTH)
        head = Head(parts_of_folder(target), torch.float32) if who == "head" else None
        for number in numbers:
            if head is not None:
                if args.fresh:
                    head.reset()
                student: Student = HeadStudent(head, recipe)
            else:
                draft = load_draft_for_training(settings)
                assert isinstance(draft, PreTrainedModel)
                student = Draft(lora.attach(draft, recipe))
            keep = args.keep / f"{who}-{args.kind}-{number}" if args.keep else None
            line: dict[str, Any] = {"who": who, "recipe": text, "kind": args.kind, "seed": args.seed}
            line |= {"generations": number, "then": args.then if number > len(said) else None}
            if _key(line) in done and (head is None or (keep and keep.is_dir())):
                if head is not None and keep is not None:  # which goes on from there
                    student.restore(load_file(keep / "model.safetensors"))
                continue
            now = said[:number]
            if number > len(said):  # both kinds, also in the tenth by which the weights are chosen
                now = random.Random(args.seed).sample(said + later, number)
            figures = grown(student, now, held, recipe, keep)
            line |= figures
            steps = " ".join(f"{a:.3f}" for a in figures["by_step"])
            print(
                f"{who} [{text}] {args.kind} after {number}: {figures['tokens_a_round']:.2f} tokens a round, "
                f"acceptance {steps}, {figures['cpu_s']:.0f} s, best step {figures['best_step']} of "
                f"{figures['steps']}; {repeated:.1%} of 8-grams repeated",
                flush=True,
            )
            if number > len(said):
                other_replays = student.replay(later_held)
                line |= {"other_acceptance": acceptance_rate(other_replays)}
                print(
                    f"  on {args.then}: acceptance {acceptance_rate(other_replays):.3f}, "
                    f"{mean_acceptance_length(other_replays, LENGTH):.2f} tokens a round",
                    flush=True,
                )
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    """What tells apart the lines of results."""
    return tuple(line.get(name) for name in ("who", "recipe", "kind", "seed", "generations", "then"))


def _repeated(generations: Sequence[Any]) -> float:
    """The share of 8-grams in the answers that occurred before in the same answer."""
    from trainers.dataset import repeated_ngrams

    return float(np.concatenate([repeated_ngrams(g.output) for g in generations]).mean())


if __name__ == "__main__":
    main()
