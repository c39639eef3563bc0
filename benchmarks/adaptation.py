"""Measures how far and how fast training raises acceptance on a stream of real prompts, and how much is retained.

    python benchmarks/adaptation.py --cache DIR [--stream change:math,tools] [--recipe loss=js,rank=8] [--json FILE]

In:  prompts by kind. The target answers each prompt once (``streams.py``), and all recipes use those answers.
Out: for every stream, recipe and seed: acceptance, mean acceptance length and predicted tokens per
     second after each round of training, on held-out prompts that never occur in the stream and (``live``) on
     those that come before the next round of training; retention; break-even.

Training is ``trainers.run.distill`` on a real log and a real store, gate included, at the generations
given by ``--rounds``. Acceptance is by replay, which is exact. Tokens per second are predicted: expected
rounds by replay times the costs of a round on this machine (``--costs``), at the best fixed draft length;
a controller does as well or better. Training seconds are the processor time of one core for the whole training
run, so other programs on the machine change them little. Intervals are 95% over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from report import report
from streams import Stream, answers_of, stream
from torch import nn
from transformers import PreTrainedModel

from adaptive.control.costs import LONGEST, CostTable
from adaptive.measure import measure
from adaptive.pair import BUNDLED, load_draft_for_training, load_pair, pair_identity
from adaptive.records.writer import LogWriter
from adaptive.settings import Settings
from adaptive.state import PairState
from adaptive.types import Generation, SamplingParams
from checkpoints.store import AdapterStore
from trainers import lora
from trainers.batches import PASS_TOKENS, longest_output
from trainers.dataset import Example, examples, from_rows, prompt_key, read_log, row, split
from trainers.fit import fit
from trainers.recipe import Recipe
from trainers.replay import Replay, acceptance_rate, expected_rounds, mean_acceptance_length, replay
from trainers.run import distill


@dataclass(frozen=True)
class Figures:
    """Figures of one draft on a set of ``tokens`` drafted positions: acceptance, mean acceptance length at
    ``--draft-length``, and expected rounds at every fixed length from 0 (plain decoding). Rounds times the
    costs of a round give seconds."""

    acceptance: float
    mean_acceptance_length: float
    tokens: int
    rounds: list[float]


@dataclass(frozen=True)
class Point:
    """Figures after the first ``generations`` of the stream (``by_kind``: their number by kind) and ``train_s``
    processor seconds of training in total. ``held_out``: by kind, on held-out prompts. ``all``: on the held-out
    prompts of the stream's kinds together. ``live``: on the generations until the next training (None at the end)."""

    generations: int
    by_kind: dict[str, int]
    train_s: float
    status: str
    message: str
    held_out: dict[str, Figures]
    all: Figures
    live: Figures | None


def figures(replays: list[Replay], draft_length: int) -> Figures:
    """The figures of these replays."""
    tokens = sum(r.positions for r in replays)
    rounds = [float(expected_rounds(replays, length)[1].sum()) for length in range(1, LONGEST + 1)]
    return Figures(
        acceptance_rate(replays), mean_acceptance_length(replays, draft_length), tokens, [float(tokens), *rounds]
    )


class Rounds:
    """A learner that trains as ``adaptive distill`` does, with a log, a store and a gate."""

    def __init__(self, folder: Path, settings: Settings, recipe: Recipe) -> None:
        self.state, self.recipe = PairState(folder), recipe
        self.base, draft = pair_identity(settings).base, load_draft_for_training(settings)
        assert isinstance(draft, PreTrainedModel)
        self.draft = draft
        self.store = AdapterStore(self.state.adapters)
        self.log = LogWriter(self.state.records)

    def hear(self, new: list[Generation]) -> None:
        """Write these generations to the log."""
        for generation in new:
            self.log.write(generation)
            self.log.flush()

    def learn(self) -> tuple[str, str]:
        """Run one round of training. Returns the status of its adapter and a message."""
        outcome = distill(self.state.records, self.store, self.base, self.draft, self.recipe)
        return outcome.manifest.status if outcome.manifest else "nothing better", outcome.message

    @contextmanager
    def in_use(self) -> Iterator[Any]:
        """The draft with the current adapter, if there is one."""
        current = self.store.current_id()
        if current is None:
            yield self.draft
            return
        model = lora.load(self.draft, self.store.path(current))
        try:
            yield model
        finally:
            lora.remove(model)


class Full(Rounds):
    """Full fine-tuning of the draft, the ceiling: same records, split, loss and steps, no adapter, no gate."""

    embeddings = True

    def learn(self) -> tuple[str, str]:
        """Train from the original draft; keep the checkpoint that is best on the validation prompts."""
        if not hasattr(self, "fresh"):
            self.fresh = lora.snapshot(self.draft)
        lora.restore(self.draft, self.fresh)
        context = longest_output(self.draft)
        parts = split(read_log(self.state.records, self.recipe.buffer))
        validation = examples(parts.validation, context)

        def evaluate(step: int) -> float:
            return acceptance_rate(replay(self.draft, validation))

        self.draft.requires_grad_(True)
        for module in (self.draft.get_input_embeddings(), self.draft.get_output_embeddings()):
            assert isinstance(module, nn.Module)
            module.requires_grad_(self.embeddings)
        result = fit(self.draft, examples(parts.train, context), evaluate, self.recipe)
        lora.restore(self.draft, result.best or self.fresh)
        return "kept" if result.best else "nothing better", f"step {result.best_step} of {result.steps}"


class Layers(Full):
    """Full fine-tuning without the embeddings: an adapter trains no more than that where the embeddings are tied."""

    embeddings = False


def as_examples(generations: list[Generation]) -> list[Example]:
    """The generations as examples for replay. Outputs are cut at their first loop."""
    rows = [
        row(n, prompt_key(g), g.domain, g.prompt, g.output, g.sampling, g.supervision, g.finish_reason == "length")
        for n, g in enumerate(generations, 1)
    ]
    return [e for e in examples(from_rows(rows), PASS_TOKENS // 2) if e.replayable]


def follow(learner: Rounds, given: Stream, rounds: list[int], draft_length: int) -> Iterator[Point]:
    """Go through the whole stream, with training after each of ``rounds`` generations. The first point is untrained."""
    held_out = {kind: as_examples(generations) for kind, generations in given.held_out.items()}
    kinds = dict.fromkeys(g.domain or "" for g in given.generations)
    train_s = 0.0
    for at, until in zip([0, *rounds], [*rounds, len(given.generations)], strict=True):
        status, message = "untrained", ""
        if at:
            began = time.process_time()
            status, message = learner.learn()
            train_s += time.process_time() - began
        said, coming = given.generations[:at], given.generations[at:until]
        with learner.in_use() as draft:
            replays = {kind: replay(draft, found) for kind, found in held_out.items()}
            live = replay(draft, as_examples(coming)) if coming else None
        yield Point(
            generations=at,
            by_kind={kind: sum(g.domain == kind for g in said) for kind in kinds},
            train_s=train_s,
            status=status,
            message=message,
            held_out={kind: figures(found, draft_length) for kind, found in replays.items()},
            all=figures([r for kind in kinds for r in replays[kind]], draft_length),
            live=figures(live, draft_length) if live else None,
        )
        learner.hear(coming)


def recipe_of(text: str, seed: int, draft_length: int) -> tuple[type[Rounds], Recipe]:
    """Parse ``loss=js,rank=8`` into a recipe; the names are fields of ``Recipe``. ``full=all`` is full fine-tuning,
    ``full=layers`` the same without the embeddings."""
    choices: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name != "full" and name not in {field.name for field in fields(Recipe)}:
            raise SystemExit(f"--recipe {text}: {name!r} is no field of Recipe (trainers/recipe.py)")
        try:
            choices[name] = json.loads(value)
        except json.JSONDecodeError:
            choices[name] = value
    learner = {"all": Full, "layers": Layers, None: Rounds}[choices.pop("full", None)]
    return learner, replace(Recipe(seed=seed, draft_length=draft_length), **choices)


def costs_of(file: Path, settings: Settings, temperature: float) -> CostTable:
    """Costs of a round: read from ``file``, or measured now and written to it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        table = measure(load_pair(settings), SamplingParams(temperature=temperature, seed=0), thorough=True).costs
        file.write_text(json.dumps(asdict(table)))
    values = json.loads(file.read_text())
    return CostTable(**{**values, "verify_s": tuple(values["verify_s"])})


def main() -> None:
    """Run the combinations that the results do not contain yet, then report all requested ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path, default=BUNDLED / "prompts", help="folder of <kind>.jsonl")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the target's answers, made once")
    parser.add_argument("--stream", action="append", help="SHAPE:KINDS, e.g. stationary:math (repeatable)")
    parser.add_argument("--watch", default="", help="kinds beside the stream's whose retention is reported")
    parser.add_argument("--recipe", action="append", help="fields of Recipe, e.g. loss=js,rank=8 (repeatable)")
    parser.add_argument("--rounds", default="100,200,300,400,500", help="generations after which training runs")
    parser.add_argument("--answers", type=int, default=2, help="answers to each prompt, with different seeds")
    parser.add_argument("--set-aside", type=int, default=64, help="prompts of each kind that never come")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--draft-length", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--costs", type=Path, help="JSON of a cost table; measured and written where it is not there")
    parser.add_argument("--json", type=Path, help="all results; what is there already is not run again")
    parser.add_argument("--plot", action="store_true", help="acceptance over generations, in the terminal")
    args = parser.parse_args()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = Settings(target=args.target, draft=args.draft, device="cpu", max_new_tokens=args.max_new_tokens)
    specs, recipes = args.stream or ["stationary:tools"], args.recipe or [""]
    rounds = [int(part) for part in args.rounds.split(",")]
    kinds = dict.fromkeys(k for spec in specs for k in spec.split(":")[1].split(","))
    kinds |= dict.fromkeys(filter(None, args.watch.split(",")))
    answers = {
        kind: answers_of(kind, settings, args.prompts, args.cache, args.temperature, args.answers) for kind in kinds
    }
    kept = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    asked = [(spec, text, seed) for spec in specs for text in recipes for seed in range(args.seeds)]
    pair = pair_identity(settings).id
    shared = (args.rounds, args.temperature, args.draft_length, args.set_aside, args.answers, args.max_new_tokens)
    names = {one: "|".join(map(str, (*one, *shared, args.watch, pair))) for one in asked}
    for one in asked:
        if names[one] in kept:
            continue
        spec, text, seed = one
        learner, recipe = recipe_of(text, seed, args.draft_length)
        watched = {k: answers[k] for k in [*spec.split(":")[1].split(","), *filter(None, args.watch.split(","))]}
        given = stream(spec, watched, rounds[-1], args.set_aside, seed)
        with tempfile.TemporaryDirectory() as folder:
            points = list(follow(learner(Path(folder), settings, recipe), given, rounds, args.draft_length))
        kept[names[one]] = {"stream": spec, "recipe": text, "seed": seed, "points": [asdict(p) for p in points]}
        last = points[-1]
        print(
            f"{spec} [{text or 'default'}] seed {seed}: acceptance {points[0].all.acceptance:.3f} -> "
            f"{last.all.acceptance:.3f}, {last.train_s:.0f} s of training",
            flush=True,
        )
        if args.json:
            unfinished = args.json.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(kept, indent=1))
            os.replace(unfinished, args.json)
    torch.set_num_threads(threads)
    report(
        [kept[names[one]] for one in asked],
        costs_of(args.costs or args.cache / f"costs-{pair}-{args.temperature:g}.json", settings, args.temperature),
        args.plot,
    )


if __name__ == "__main__":
    main()
