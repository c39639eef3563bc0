"""Text of the draft itself, on which training keeps what the draft knows.

In: the plain draft and the chat format. Out: chats that the draft has made up, as ``Example``s with the draft's own
distribution as supervision; kept in one file, since they depend on the draft alone.

**Why.** An adapter that was trained on one kind of text guesses other kinds worse than the plain draft did: after 223
mathematical answers the acceptance on programs fell from 0.70 to 0.38. What will be asked next is in no log. The draft
itself samples from all that it was trained on, and an adapter that also keeps the draft's distribution on such samples
loses next to nothing elsewhere (0.68; docs/notes/2026-11-distillation.md). The samples are chats, made by letting the
draft continue the beginning of a chat (Xu et al. 2024, "Magpie"); keeping old abilities by old outputs is "Learning
without forgetting" (Li and Hoiem 2016), and by generated samples LAMOL (Sun et al. 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from adaptive.encoding import chat_text, encode_rendered
from adaptive.errors import AdaptiveError
from adaptive.types import SamplingParams, Supervision
from trainers import processes
from trainers.batches import PASS_LOGITS, collate, longest_text, passes, supervised_logits
from trainers.dataset import Example, Stopped
from trainers.tensors import replace_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Texts of a run: as many as it has records to learn from, within these bounds. Too few: the adapter learns these by
# heart. Too many: sampling them takes longer than it brings, and the first adapter comes later.
LEAST, MOST = 32, 256
# Most tokens of a made-up question, and of its answer. Too few: no long text is kept. Too many: sampling and training
# take long.
QUESTION, ANSWER = 64, 96
# Answers of fewer tokens are left out.
SHORTEST = 4
# Texts that are sampled at a time, at most. Too few: a pass over the weights gives few tokens. Too many: memory, and a
# request waits longer for the pass to end.
TOGETHER = 32
# Likeliest tokens that are kept of the draft's distribution, as the log keeps them of the target's.
KEPT = 32
# Stands for a question in a chat while its format is found. A template must not change it, nor have it elsewhere.
MARK = "A-Question-Here"
# The format of the file.
VERSION = 1


@dataclass(frozen=True)
class Frame:
    """Token ids before and after the question of a chat, and the tokens that end a question or an answer. With an empty
    ``after`` the whole text is an answer, to the prompt ``before``."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Frame | None:
        """The format of this tokenizer's chats; of plain text where it has no usable chat template. None if there is no
        token that a text begins with either."""
        ends = {tokenizer.eos_token_id} - {None}
        try:
            parts = chat_text(tokenizer, [{"role": "user", "content": MARK}]).split(MARK)
            halves = [tuple(encode_rendered(tokenizer, part, len(part) + 1)) for part in parts]
        except AdaptiveError:
            halves = []
        if len(halves) == 2 and all(halves):
            return cls(halves[0], halves[1], frozenset(ends | {halves[1][0]}))
        begins = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return None if begins is None else cls((begins,), (), frozenset(ends))


@dataclass(frozen=True)
class Rehearsal:
    """Where a draft's texts come from: ``frame``, the chat format, and ``file``, where they are kept for the draft of
    these ``weights`` (a hash)."""

    frame: Frame
    file: Path
    weights: str

    def texts(
        self, draft: PreTrainedModel, records: int, should_stop: Callable[[], bool], tell: Callable[[int, int], None]
    ) -> list[Example]:
        """The texts of the plain ``draft`` for a run that learns from so many ``records``: from the file, or sampled
        now and kept group by group, so that the next run goes on with what is there. ``tell`` gets the number of texts
        that are written, and of all. Raises Stopped between two passes."""
        wanted = min(max(records, LEAST), MOST)
        # Without what comes before a question: some templates write today's date there.
        key = f"{VERSION} {self.weights} {self.frame.after} {sorted(self.frame.ends)}"
        found = _load(self.file, key)
        while len(found) < wanted:
            tell(len(found), wanted)
            # The number of texts is the seed: the same texts in all processes, and however often it was stopped.
            group = sample(draft, self.frame, should_stop, seed=len(found))
            if not group:
                break
            numbered = (replace(text, id=-1 - len(found) - place) for place, text in enumerate(group))
            found = [*found, *numbered]
            if processes.first():
                _save(self.file, key, found)
        return found[:wanted]


def rehearsal_of(tokenizer: PreTrainedTokenizerBase, file: Path, weights: str) -> Rehearsal | None:
    """The rehearsal of the draft with these ``weights``; None if its tokenizer says too little."""
    frame = Frame.of(tokenizer)
    return None if frame is None else Rehearsal(frame, file, weights)


@torch.no_grad()
def sample(draft: PreTrainedModel, frame: Frame, should_stop: Callable[[], bool], seed: int = 0) -> list[Example]:
    """A group of up to TOGETHER chats that ``draft`` makes up at temperature 1; fewer where it answers with next to
    nothing or its vocabulary is large. Raises Stopped between two passes when ``should_stop`` returns True."""
    draft.eval()
    together = max(1, min(TOGETHER, PASS_LOGITS // (4 * int(draft.config.get_text_config().vocab_size))))
    random = torch.Generator(next(draft.parameters()).device).manual_seed(seed)
    chats = _sample(draft, frame, together, random, should_stop)
    return _supervised(draft, [chat.example() for chat in chats if chat.long_enough], should_stop)


def _sample(
    draft: PreTrainedModel, frame: Frame, rows: int, random: torch.Generator, should_stop: Callable[[], bool]
) -> list[_Chat]:
    """Sample ``rows`` chats in common passes. Every row has the same number of tokens at any time, so that none needs
    padding. None of a model that keeps its state elsewhere than in ``past_key_values`` (Mamba): each token would take a
    pass over the whole text."""
    chats = [_Chat(frame) for _ in range(rows)]
    tokens = torch.tensor([frame.before] * rows, device=random.device)
    past: Any = None
    for _ in range(min(longest_text(draft) - len(frame.before), QUESTION + len(frame.after) + ANSWER)):
        if should_stop():
            raise Stopped
        passed = draft(input_ids=tokens, past_key_values=past, use_cache=True)
        past = getattr(passed, "past_key_values", None)
        if past is None:
            return []
        drawn = draw(passed.logits[:, -1].float(), random).tolist()
        following = [chat.take(token) for chat, token in zip(chats, drawn, strict=True)]
        if all(chat.over for chat in chats):
            break
        tokens = torch.tensor(following, device=random.device)[:, None]
    return chats


def draw(logits: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A token of each row's distribution, (rows,), from logits (rows, vocabulary): where the sum of the probabilities
    reaches a random number above 0. ``torch.multinomial`` draws a number for each token of the vocabulary instead, a
    quarter of the work of sampling."""
    sums = logits.softmax(-1).cumsum(-1)
    reached = (1.0 - torch.rand(len(sums), 1, generator=random, device=sums.device)) * sums[:, -1:]
    return torch.searchsorted(sums, reached)[:, 0]


class _Chat:
    """One chat while it is sampled."""

    def __init__(self, frame: Frame) -> None:
        self.over = False
        self._frame = frame
        self._question, self._answer = list(frame.before), list[int]()
        self._asking = bool(frame.after)
        self._given: list[int] = []  # of ``frame.after``, what is still to come

    @property
    def long_enough(self) -> bool:
        """Whether the answer is worth training on."""
        return len(self._answer) >= SHORTEST

    def take(self, drawn: int) -> int:
        """Go on by one token, ``drawn`` or one that the format has in its place; returns it."""
        if self._asking and (drawn in self._frame.ends or len(self._question) >= len(self._frame.before) + QUESTION):
            self._asking, self._given = False, list(self._frame.after)
        if self._given or self._asking:
            token = self._given.pop(0) if self._given else drawn
            self._question.append(token)
            return token
        if not self.over:
            self._answer.append(drawn)
            self.over = drawn in self._frame.ends or len(self._answer) >= ANSWER
        return drawn

    def example(self) -> Example:
        """The chat as an example without supervision."""
        prompt, output = np.array(self._question, np.int32), np.array(self._answer, np.int32)
        limited = self._answer[-1] not in self._frame.ends
        return Example(0, "", prompt, output, SamplingParams(temperature=1.0), limited, None)


def _supervised(draft: PreTrainedModel, texts: Sequence[Example], should_stop: Callable[[], bool]) -> list[Example]:
    """``texts`` with the draft's own distribution as supervision. Raises Stopped."""
    device = next(draft.parameters()).device
    limit, vocab = longest_text(draft), int(draft.config.get_text_config().vocab_size)
    found: list[Example] = []
    for group in passes(texts, limit, vocab):
        if should_stop():
            raise Stopped
        law = supervised_logits(draft, collate(group, limit, device)).float().log_softmax(-1)
        output = torch.from_numpy(np.concatenate([text.output for text in group])).long().to(device)
        logprobs, ids = law.topk(min(KEPT, law.shape[-1]))
        rest = torch.log1p(-logprobs.double().exp().sum(-1).clamp(max=1 - 1e-9))
        parts = ids.int(), logprobs.half(), rest.half(), law.gather(-1, output[:, None])[:, 0].half()
        lengths = [len(text.output) for text in group]
        for text, *each in zip(group, *(part.cpu().split(lengths) for part in parts), strict=True):
            found.append(replace(text, supervision=Supervision(*(part.numpy() for part in each))))
    return found


def _save(file: Path, key: str, texts: Iterable[Example]) -> None:
    """Replace ``file``, if it can be written: without it, the texts are sampled again by the next run."""
    held = [(text, text.supervision) for text in texts if text.supervision is not None]
    tensors = {
        "lengths": torch.tensor([[len(text.prompt), len(text.output)] for text, _ in held], dtype=torch.int32),
        "prompt": torch.from_numpy(np.concatenate([text.prompt for text, _ in held])),
        "output": torch.from_numpy(np.concatenate([text.output for text, _ in held])),
        "limited": torch.tensor([text.limited for text, _ in held]),
        **{
            name: torch.from_numpy(np.concatenate([getattr(supervision, name) for _, supervision in held]))
            for name in ("ids", "logprobs", "rest", "chosen")
        },
    }
    with suppress(OSError):
        replace_tensors(file, tensors, {"of": key})


def _load(file: Path, key: str) -> list[Example]:
    """The texts in ``file``; none if it is missing, damaged, or another draft's."""
    try:
        with safe_open(file, "np") as held:
            if (held.metadata() or {}).get("of") != key:
                return []
            parts = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118 - no mapping
        prompt_ends, output_ends = np.cumsum(parts["lengths"][:-1], axis=0).T
        prompts = np.split(parts["prompt"], prompt_ends)
        columns = [np.split(parts[name], output_ends) for name in ("output", "ids", "logprobs", "rest", "chosen")]
        sampling = SamplingParams(temperature=1.0)
        return [
            Example(-1 - number, "", prompt, output, sampling, bool(limited), Supervision(*each))
            for number, (prompt, limited, output, *each) in enumerate(
                zip(prompts, parts["limited"], *columns, strict=True)
            )
        ]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError):
        return []
