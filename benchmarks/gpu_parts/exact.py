"""Checks that decoding is exact on the device: greedy answers, recorded passes, an adapter swapped in mid-answer, short
memory, other architectures. Raises ``Wrong`` if something is not exact."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from tiny_models import Greedy, alone, noisy, prompt_of, tiny_model

from adaptive.control.policy import FixedLength
from adaptive.engines.hf.engine import TransformersEngine, reserve
from adaptive.engines.hf.graphs import RecordedPasses
from adaptive.engines.protocol import Engine
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair
from gpu_parts.saying import Speaker, continued, controller, model_of, prompts, text
from gpu_parts.work import Bench, Figures, Wrong
from trainers import lora
from trainers.recipe import Recipe

# Two answers may differ from a tie on: where the logits of both tokens differ by less than this share of the largest
# logit. Passes of several tokens round differently from single ones, by a few of the last digits in each layer.
TIE = {torch.float32: 1e-4, torch.bfloat16: 0.06}
# Standard deviation of an adapter's weights: large enough to change the draft's logits.
STRENGTH = 0.05
# Tokens of the answer in which an adapter is swapped, at least: enough rounds for all of its steps.
SWAPPED = 64
# More tokens than any memory holds, and bytes of the device's memory that are left for the passes of an answer.
TOO_MANY, LEFT = 1 << 45, 256 << 20


def parted(engine: Engine, prompt: list[int], one: list[int], other: list[int]) -> float | None:
    """The difference of the logits of the first two tokens in which two answers to a prompt differ, as a share of the
    largest logit; None if the answers are the same."""
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
    if place is None:
        return None
    logits = engine.sequence().extend([*prompt, *one[:place]], 1)[0].float()
    return float((logits[one[place]] - logits[other[place]]).abs() / logits.abs().max())


def compare(engine: Engine, prompt: list[int], one: list[int], other: list[int], what: str) -> int:
    """1 if two answers differ from a tie on, 0 if they are the same. Raises Wrong if they differ elsewhere."""
    gap = parted(engine, prompt, one, other)
    if gap is None:
        return 0
    allowed = TIE[model_of(engine).model.dtype]
    if gap > allowed:
        raise Wrong(f"{what} says another token whose logit is {gap:.1%} of the largest away, a tie is {allowed:.1%}")
    return 1


def greedy(bench: Bench, kind: str) -> Figures:
    """Compare answers with a draft, of fixed lengths and by the controller, with those of the target alone, by our loop
    and by transformers' ``generate``."""
    pair, scale = bench.workshop.pair(kind), bench.scale
    plain = Speaker(pair, FixedLength(0))
    drafting = {f"length {n}": Speaker(pair, FixedLength(n)) for n in scale.lengths}
    drafting["controller"] = Speaker(pair, controller(pair))
    answered, ties = 0, 0
    for prompt in prompts(bench, pair):
        if answered and bench.budget.over:
            break
        alone = plain.say(prompt, scale.tokens).output
        theirs = continued(pair.target, prompt, scale.tokens)
        ties += compare(pair.target, prompt, alone, theirs, "our loop without a draft")
        for name, speaker in drafting.items():
            said = speaker.say(prompt, scale.tokens).output
            ties += compare(pair.target, prompt, alone, said, f"decoding with a draft ({name})")
        answered += 1
    return {"answers": answered, "ways": 1 + len(drafting), "tokens": scale.tokens, "parted at a tie": ties}


def graphs(bench: Bench, kind: str) -> Figures:
    """Compare answers over recorded passes with eager ones. The second answer to a prompt must record nothing."""
    scale = bench.scale
    pair = bench.workshop.pair(kind, graphs=False)
    eager, ties, new, held = Speaker(pair, FixedLength(scale.lengths[-1])), 0, 0, 0
    expected = [eager.say(prompt, scale.tokens).output for prompt in prompts(bench, pair)[:3]]
    pair = bench.workshop.pair(kind, graphs=True)
    speaker = Speaker(pair, FixedLength(scale.lengths[-1]))
    for prompt, answer in zip(prompts(bench, pair), expected, strict=False):
        for turn in range(2):
            said = speaker.say(prompt, scale.tokens).output
            ties += compare(pair.target, prompt, answer, said, "decoding over recorded passes")
            count = sum(len(passes.recordings) for passes in _passes(pair))
            new, held = (new + count - held if turn else new), count
    for name, passes in zip(("target", "draft"), _passes(pair), strict=True):
        if passes.problem is not None or not passes.replayed:
            raise Wrong(f"passes of the {name} stay eager: {passes.problem or 'none was replayed'}")
    if new:
        raise Wrong(f"{new} passes were recorded in the second answer to a prompt")
    return {"answers": len(expected), "recordings": held, "recorded again": new, "parted at a tie": ties}


def _passes(pair: Pair) -> list[RecordedPasses]:
    """The recorded passes of the target and of the draft."""
    found = [model_of(engine).recorded for engine in (pair.target, pair.draft)]
    assert all(found)
    return [passes for passes in found if passes is not None]


def adapter(draft: TransformersEngine, folder: Path) -> Path:
    """Write an adapter of random weights for this draft to ``folder``."""
    torch.manual_seed(3)
    model = lora.attach(copy.deepcopy(draft.model).float(), Recipe(rank=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=STRENGTH)
    folder.mkdir()
    lora.write(model, lora.snapshot(model), folder)
    return folder


def swap(bench: Bench, kind: str) -> Figures:
    """Check that an adapter merged between the rounds of an answer leaves the answer unchanged, changes the draft, and
    can be removed without a trace."""
    pair, scale = bench.workshop.pair(kind), bench.scale
    draft, prompt, tokens = model_of(pair.draft), prompts(bench, pair)[0], max(SWAPPED, scale.tokens)
    expected = Speaker(pair, FixedLength(0)).say(prompt, tokens).output
    before = draft.sequence().extend(prompt, 1).clone()
    speaker = Speaker(pair, FixedLength(scale.lengths[0]))
    speaker.say(prompt, tokens)  # records all passes, so that none is recorded during the swap
    slices = 0
    with tempfile.TemporaryDirectory() as folder:
        made = adapter(draft, Path(folder) / "adapter")

        def between() -> bool:
            nonlocal slices
            if speaker.assistant.adapter is None and not speaker.assistant.swapping:
                speaker.assistant.begin_swap("swapped in", made)
            slices += speaker.assistant.swapping
            return speaker.assistant.finish_swap(0.0)

        said = speaker.say(prompt, tokens, between)
        ties = compare(pair.target, prompt, expected, said.output, "an answer in which the adapter was swapped")
        by = [name for name, _ in speaker.assistant.drafted_by]
        speaker.assistant.finish_swap()
        changed = float((draft.sequence().extend(prompt, 1) - before).abs().max())
        speaker.assistant.use_adapter(None, None)
        left = float((draft.sequence().extend(prompt, 1) - before).abs().max())
    if by != [None, "swapped in"]:
        raise Wrong(f"the adapter was not swapped in during the answer, which was drafted by {by}")
    if not changed or left:
        raise Wrong(f"the adapter changed the draft's logits by {changed}; {left} of it stayed when it was taken out")
    return {"slices": slices, "logits changed by": changed, "left of it": left, "parted at a tie": ties}


def short_memory(bench: Bench, kind: str) -> Figures:
    """Check that a reservation beyond the memory fails with one sentence, and that the text continues correctly."""
    pair, scale = bench.workshop.pair(kind), bench.scale
    sequence = model_of(pair.target).unswitched(features=False)
    words = text(bench, pair, 3 * scale.tokens)
    sequence.extend(words[: scale.tokens], 1)
    said = _refused(sequence.cache, TOO_MANY)
    figures: Figures = {"says": said}
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(bench.device)[0]
        filler = torch.empty(max(0, free - LEFT), dtype=torch.uint8, device=bench.device)
        per_token = sequence.memory.keys // sequence.cache.capacity
        figures["says on a full device"] = _refused(sequence.cache, 2 * LEFT // per_token)
        del filler
    after = sequence.extend(words[scale.tokens :], 1)
    fresh = model_of(pair.target).sequence().extend(words, 1)
    gap = float((after - fresh).abs().max() / fresh.abs().max())
    if gap > TIE[torch.float32]:
        raise Wrong(f"after memory was short logits differ by {gap:.1%}")
    return {**figures, "logits differ by": gap}


def _refused(cache: object, tokens: int) -> str:
    """The error message when ``tokens`` tokens are reserved. Raises Wrong if the reservation succeeds."""
    try:
        reserve(cache, tokens)  # type: ignore[arg-type]
    except AdaptiveError as error:
        return str(error)
    raise Wrong(f"a cache of {tokens} tokens was reserved in memory that is not there")


def architectures(bench: Bench) -> Figures:
    """Check small models of other architectures in float32; drafts that are right only sometimes change no answer."""
    accepted: dict[str, float] = {}
    for kind in bench.scale.types:
        model = tiny_model(kind)
        draft = noisy(model)
        engines = []
        for one in (model, draft):
            engine = TransformersEngine(one.to(bench.device))
            engine.cpu_forward = None
            engine.check()
            engines.append(engine)
        target, other = engines
        prompt = prompt_of(40)
        expected = alone(model, prompt, bench.scale.tokens)
        for length in (0, 4):
            talk = Greedy(target, other, length)
            said = talk.say(prompt, bench.scale.tokens)
            compare(target, prompt, expected, said, f"{kind} with {length} drafted tokens")
        accepted[kind] = talk.accepted
    return {"accepted": accepted}
