"""Makes streams of real generations, in the order in which an assistant would see them, for ``adaptation.py``.

In:  prompt files by kind and a target. Out: ``Stream``: generations in order, and held-out ones.

The target's text does not depend on the draft (decoding is lossless), so each prompt is answered
once and logged with the stored distributions into the ``records.db`` of a folder in ``CACHE``. Every
recipe and seed replays the same answers.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaptive.decoding.supervision import SupervisionBuffer
from adaptive.errors import AdaptiveError
from adaptive.pair import base_of, load_tokenizer, sources
from adaptive.records.log import Log
from adaptive.records.writer import LogWriter
from adaptive.sampling import transform_logits
from adaptive.settings import Settings
from adaptive.types import Generation, Message, SamplingParams, Timings
from cli.prompts import read_prompts

# Prompts answered together. Fewer leave a core waiting for memory; more wait longer for the longest answer.
BATCH = 32
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
        with LogWriter(log) as writer:
            for made in _answer(kind, settings, chats, missing, temperature):
                writer.write(made)
                writer.flush()
                found[int(made.session)].append(made)
    return Answers(kind, [made[:each] for made in found])


def _answer(
    kind: str,
    settings: Settings,
    chats: Sequence[tuple[Message, ...]],
    missing: list[tuple[int, int]],
    temperature: float,
) -> Iterator[Generation]:
    """Answer the missing (repetition, prompt) pairs in batches of similar length, with a progress bar."""
    from rich.progress import track
    from transformers import AutoModelForCausalLM

    tokenizer: Any = load_tokenizer(settings)
    target: Any = AutoModelForCausalLM.from_pretrained(sources(settings)[0].folder, dtype=torch.float32).eval()
    ids = []
    for messages in chats:
        chat = [{"role": m.role, "content": m.content} for m in messages]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids.append(tokenizer.encode(text, add_special_tokens=False))
    missing.sort(key=lambda pair: (pair[0], len(ids[pair[1]])))
    batches = [missing[at : at + BATCH] for at in range(0, len(missing), BATCH)]
    for batch in track(batches, f"answering {kind}", transient=True):
        torch.manual_seed(batch[0][0] * 100_003 + batch[0][1])
        sampling = SamplingParams(temperature=temperature)
        outputs = _generate(target, tokenizer, [ids[i] for _, i in batch], sampling, settings.answer_tokens)
        for (_, i), output in zip(batch, outputs, strict=True):
            yield _generation(target, tokenizer, kind, i, chats[i], ids[i], output, sampling, settings.answer_tokens)


def _generate(
    target: Any, tokenizer: Any, prompts: list[list[int]], sampling: SamplingParams, longest: int
) -> list[list[int]]:
    width = max(map(len, prompts))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    how = {} if sampling.greedy else {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    how["repetition_penalty"] = sampling.repetition_penalty  # not the checkpoint's, which the record would not show
    with torch.inference_mode():
        made = target.generate(
            ids, attention_mask=mask, max_new_tokens=longest, do_sample=not sampling.greedy, pad_token_id=pad, **how
        )
    rows = made[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def _generation(
    target: Any,
    tokenizer: Any,
    kind: str,
    number: int,
    messages: tuple[Message, ...],
    prompt: list[int],
    output: list[int],
    sampling: SamplingParams,
    longest: int,
) -> Generation:
    """The record; one teacher-forced pass of the target gives its supervision. ``session`` is the prompt's number."""
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()
    chosen = torch.zeros(len(output))
    if not sampling.greedy:
        log_p = transform_logits(logits, sampling).log_softmax(-1)
        chosen = log_p.gather(-1, torch.tensor(output)[:, None])[:, 0]
    tape = SupervisionBuffer()
    tape.append(logits, chosen)
    return Generation(
        session=str(number),
        created=time.time(),
        messages=messages,
        prompt_text="",
        text=tokenizer.decode(output, skip_special_tokens=True),
        prompt=np.array(prompt, np.int32),
        output=np.array(output, np.int32),
        sampling=sampling,
        adapter=None,
        engine="transformers",
        domain=kind,
        finish_reason="length" if len(output) == longest else "stop",
        rounds=(),
        timings=Timings(len(prompt), 0, 0.0, len(output), 0.0),
        supervision=tape.take(len(output)),
    )
