"""Makes streams of real generations, in the order in which an assistant would see them, for ``adaptation.py``.

In:  prompt files by kind and a target. Out: ``Stream``: generations in order, and held-out ones.

The target's text does not depend on the draft (decoding is lossless), so each prompt is answered
once and logged with the stored distributions into the ``records.db`` of a folder in ``CACHE``. Every
recipe and seed replays the same answers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.errors import AdaptiveError
from adaptive.pair import PLAIN, base_of, load_pair, sources
from adaptive.records.log import Log
from adaptive.records.writer import LogWriter
from adaptive.settings import Settings
from adaptive.types import Generation, Message, SamplingParams, StopParams
from cli.prompts import read_prompts

# Generations of one kind in a row in a ``turns`` stream.
TURN = 25


@dataclass(frozen=True)
class Stream:
    """``generations``: in the order of the stream. ``held_out``: by kind, of prompts that never occur in the stream."""

    generations: list[Generation]
    held_out: dict[str, list[Generation]]


@dataclass(frozen=True)
class Answers:
    """The answers of one kind. ``by_prompt[i]``: the answers to prompt i, drawn with different seeds."""

    kind: str
    by_prompt: list[list[Generation]]


def stream(spec: str, answers: dict[str, Answers], length: int, set_aside: int, seed: int) -> Stream:
    """``length`` generations of a spec like ``change:math,tools``; ``set_aside`` prompts of each kind are held out.

    ``stationary`` has one kind, ``turns`` alternates between kinds, ``change`` spends an equal
    part on each, one after the other, ``mixture`` shuffles them. Prompts of kinds that are not in the stream
    are held out too, which shows whether training makes the draft worse on them. Prompts come in a seeded
    order; each comes once before any is repeated (with another answer).
    """
    shape, _, names = spec.partition(":")
    kinds = names.split(",")
    queues, held_out = {}, {}
    for kind, given in answers.items():
        order = random.Random(f"{seed} {kind}").sample(given.by_prompt, len(given.by_prompt))
        held_out[kind] = [generations[0] for generations in order[:set_aside]]
        rounds = range(max(map(len, order)))
        queues[kind] = [g[n] for n in rounds for g in order[set_aside:] if n < len(g)]
    share = -(-length // len(kinds))
    if any(len(queues[kind]) < share for kind in kinds):
        most = min(len(queues[kind]) for kind in kinds) * len(kinds)
        raise AdaptiveError(f"stream {spec} has {most} generations, {length} were asked for; raise --answers")
    parts = {kind: queues[kind][:share] for kind in kinds}
    if shape in ("stationary", "change"):
        ordered = [g for kind in kinds for g in parts[kind]]
    elif shape == "turns":
        starts = range(0, share, TURN)
        ordered = [g for start in starts for kind in kinds for g in parts[kind][start : start + TURN]]
    elif shape == "mixture":
        ordered = [g for kind in kinds for g in parts[kind]]
        random.Random(seed).shuffle(ordered)
    else:
        raise AdaptiveError(f"stream {spec!r} has an unknown shape; stationary, turns, change or mixture")
    return Stream(ordered[:length], held_out)


def folder_of(kind: str, settings: Settings, prompts: Path, cache: Path, temperature: float) -> Path:
    """The folder of the answers to ``prompts/<kind>.jsonl``. The end of its name depends on all else that decides their
    text: the target's weights, the longest answer and the prompts."""
    target = base_of(sources(settings)[0]).weights
    decides = f"{target} {settings.answer_tokens} ".encode() + (prompts / f"{kind}.jsonl").read_bytes()
    return cache / f"{kind}-{temperature:g}-{hashlib.sha256(decides).hexdigest()[:8]}"


def answers_of(kind: str, settings: Settings, prompts: Path, cache: Path, temperature: float, each: int) -> Answers:
    """``each`` answers to every prompt of ``prompts/<kind>.jsonl``; answers already in the cache are reused."""
    chats = [prompt.messages for prompt in read_prompts(prompts / f"{kind}.jsonl")]
    folder = folder_of(kind, settings, prompts, cache, temperature)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "records.db"
    found: list[list[Generation]] = [[] for _ in chats]
    for logged in Log(log).generations():
        found[int(logged.generation.session)].append(logged.generation)
    missing = [(n, i) for n in range(each) for i in range(len(chats)) if len(found[i]) <= n]
    if missing:
        _answer(kind, settings, chats, missing, temperature, log)
        return answers_of(kind, settings, prompts, cache, temperature, each)
    return Answers(kind, [made[:each] for made in found])


def _answer(
    kind: str,
    settings: Settings,
    chats: Sequence[tuple[Message, ...]],
    missing: list[tuple[int, int]],
    temperature: float,
    log: Path,
) -> None:
    """Log the target's answers of the missing (repetition, prompt) pairs, in float32, with a progress bar. An answer's
    ``session`` is the number of its prompt."""
    from rich.progress import track

    alone = settings.model_copy(update={"draft": PLAIN, "dtype": "float32", "target": sources(settings)[0].id})
    sampling, stop = SamplingParams(temperature=temperature), StopParams(settings.answer_tokens)
    with LogWriter(log) as writer:
        assistant = Assistant(load_pair(alone), FixedLength(0), writer)
        for number, prompt in track(missing, f"answering {kind}", transient=True):
            assistant.chance = random.Random(f"{kind} {number} {prompt}")
            for _ in assistant.chat(chats[prompt], sampling, stop, session=str(prompt), domain=kind):
                pass
            writer.flush()
