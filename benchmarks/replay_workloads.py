"""Logs generations in the form that the controller's replay needs: accepted positions and the draft's confidence.

In:  a pair of models, and a folder of chat records (``*.jsonl.gz``, ``{"messages": [...]}`` a line).
Out: one ``.npz`` file of ``Trace`` objects by name, which ``benchmarks/controller.py`` replays.

The target answers greedily, or with ``--temperature`` each answer under its own seed. Answers are cut at their
first loop. One teacher-forced pass of the draft gives for every position whether its token is the target's, and the
probability of its likeliest token. The draft's steps *after* a token that will be rejected cost time too, and their
number depends on its confidence there, so the draft continues each rejected token (all rejections of an answer in one
batch). With both, a replayed round is exactly the round that would have run.

    python benchmarks/replay_workloads.py --data DATA --out workloads.npz
"""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adaptive.noise import keys_of, winner

# Draft positions logged after a rejection. No policy may draft further than this.
DEPTH = 16
# Where several records share a prompt: tokens of the recorded answer that are added to the prompt.
GIVEN = 16
# Most tokens of an answer in a conversation.
LONGEST_CALL = 60
# Kinds that are also logged with a draft of random weights, and with a draft distilled on their first half.
USELESS = ("gsm8k_train",)
ADAPTED = ("gsm8k_train", "tool_calls")

# A prompt, the answer to it, and whether the answer ends at the length limit.
Text = tuple[list[int], list[int], bool]


@dataclass(frozen=True)
class Trace:
    """One generation of n + 1 tokens after ``prompt`` tokens, with the proposals of one draft.

    ``accepted`` (n,) bool: whether the draft's token at output position i + 1 is the target's.
    ``confidence`` (n,) float32: the probability that the draft gives its own token there. ``beyond``
    (n, DEPTH) float32: its confidence at the positions after token i if it continues from its own
    token; NaN where that token is the target's, because then the trace itself continues (the last row is
    always set). ``limited``: the answer ends at the length limit, which a policy is given. For drafters that depend
    on tokens: ``text`` is the whole prompt and answer, ``drafts`` (n,) the draft's tokens at the positions of
    ``accepted``, and ``after`` (n, DEPTH) its tokens after its own token, where ``beyond`` is a number.
    """

    prompt: int
    accepted: npt.NDArray[np.bool_]
    confidence: npt.NDArray[np.float32]
    beyond: npt.NDArray[np.float32]
    limited: bool
    text: npt.NDArray[np.int32]
    drafts: npt.NDArray[np.int32]
    after: npt.NDArray[np.int32]


def save(file: Path, workloads: dict[str, list[Trace]]) -> None:
    """Write all traces of all workloads, joined end to end, to one compressed file."""
    arrays: dict[str, Any] = {}
    for name, paths in workloads.items():
        arrays[f"{name}/lengths"] = np.array([len(p.accepted) for p in paths])
        arrays[f"{name}/prompt"] = np.array([p.prompt for p in paths])
        arrays[f"{name}/limited"] = np.array([p.limited for p in paths])
        arrays[f"{name}/texts"] = np.array([len(p.text) for p in paths])
        for part in ("accepted", "confidence", "beyond", "text", "drafts", "after"):
            joined = np.concatenate([getattr(p, part) for p in paths])
            arrays[f"{name}/{part}"] = joined.astype(np.float16) if part in ("confidence", "beyond") else joined
    np.savez_compressed(file, **arrays)


def load(file: Path) -> dict[str, list[Trace]]:
    """The inverse of ``save``."""
    workloads: dict[str, list[Trace]] = {}
    with np.load(file) as arrays:
        for name in dict.fromkeys(key.split("/")[0] for key in arrays):
            ends = np.cumsum(arrays[f"{name}/lengths"])[:-1]
            positions = ("accepted", "confidence", "beyond", "drafts", "after")
            parts = [np.split(arrays[f"{name}/{part}"], ends) for part in positions]
            texts = np.split(arrays[f"{name}/text"], np.cumsum(arrays[f"{name}/texts"])[:-1])
            workloads[name] = [
                Trace(int(prompt), *(hit, sure.astype(np.float32), beyond.astype(np.float32)), bool(limited), *tokens)
                for prompt, hit, sure, beyond, drafts, after, limited, text in zip(
                    arrays[f"{name}/prompt"], *parts, arrays[f"{name}/limited"], texts, strict=True
                )
                for tokens in ((text, drafts, after),)
            ]
    return workloads


def openings(data: Path, kind: str, count: int, tokenizer: Any) -> list[list[int]]:
    """``count`` token-id prompts of one kind: records in hash order. A prompt that occurred before is extended by the
    first ``GIVEN`` tokens of its answer, so that every generation is different."""
    with gzip.open(data / f"{kind}.jsonl.gz", "rt", encoding="utf-8") as file:
        records = [json.loads(line)["messages"] for line in file]
    records.sort(key=lambda messages: hashlib.sha256(json.dumps(messages).encode()).digest())
    found: dict[tuple[int, ...], None] = {}
    for messages in records:
        text = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tuple(ids) in found:
            ids = ids + tokenizer.encode(messages[1]["content"], add_special_tokens=False)[:GIVEN]
        if len(ids) <= 400:
            found[tuple(ids)] = None
        if len(found) == count:
            break
    return [list(ids) for ids in found]


def answers(
    model: Any, prompts: list[list[int]], longest: int, pad: int, end: int, temperature: float = 0.0
) -> Iterator[tuple[int, list[int]]]:
    """Yield (index, answer) of the target for each prompt, each under its own seed at a temperature above 0, in batches
    of prompts of similar length."""
    import torch

    def drawn(pads: list[int], seeds: list[int], ids: Any, logits: Any) -> Any:
        probs = (logits.float() / temperature).softmax(-1)
        keys = [keys_of(seed, ids.shape[1] - padded) for seed, padded in zip(seeds, pads, strict=True)]
        return torch.zeros_like(logits).scatter_(1, winner(probs, torch.tensor(keys))[:, None], 1.0)

    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), 25):
        group = order[start : start + 25]
        width = max(len(prompts[i]) for i in group)
        pads, seeds = [width - len(prompts[i]) for i in group], [seed_of(prompts[i]) for i in group]
        ids = torch.tensor([[pad] * p + prompts[i] for p, i in zip(pads, group, strict=True)])
        mask = torch.tensor([[0] * p + [1] * (width - p) for p in pads])
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=pad, eos_token_id=end,
                repetition_penalty=1.0,
                logits_processor=[functools.partial(drawn, pads, seeds)] if temperature else [],
            )  # fmt: skip
        for i, row in zip(group, made[:, width:].tolist(), strict=True):
            yield i, row[: row.index(end) + 1] if end in row else row


def seed_of(prompt: list[int]) -> int:
    """The seed of the answer to a prompt."""
    return zlib.crc32(np.array(prompt, np.int32).tobytes())


def trace_of(draft: Any, prompt: list[int], output: list[int], limited: bool, temperature: float = 0.0) -> Trace:
    """The proposals of ``draft`` along this answer, under the answer's seed at a temperature above 0."""
    import torch
    from transformers import DynamicCache

    text = torch.tensor([prompt + output])
    seed = seed_of(prompt)
    first = len(prompt)  # the draft's logits at position first + i predict output token i + 1
    with torch.inference_mode():
        cache = DynamicCache(config=draft.config)
        logits = draft(text[:, :-1], past_key_values=cache, use_cache=True).logits[0, first:].float()
        best, confidence = _chosen(logits, range(first + 1, first + 1 + len(logits)), temperature, seed)
        accepted = best == text[0, first + 1 :]
        leaves = (~accepted).nonzero()[:, 0]
        if not len(leaves) or leaves[-1] != len(accepted) - 1:
            leaves = torch.cat([leaves, torch.tensor([len(accepted) - 1])])
        beyond = torch.full((len(accepted), DEPTH), float("nan"))
        after = torch.full((len(accepted), DEPTH), -1, dtype=torch.long)
        beyond[leaves], after[leaves] = _continued(draft, cache, first + leaves, best[leaves], temperature, seed)
    tokens = (part.int().numpy() for part in (text[0], best, after))
    return Trace(first, accepted.numpy(), confidence.numpy(), beyond.numpy(), limited, *tokens)


def _chosen(logits: Any, places: Sequence[int], temperature: float, seed: int) -> tuple[Any, Any]:
    """The tokens that the draft chooses from logits (n, vocab) at these positions of the text, and its confidence."""
    import torch

    if not temperature:
        best = logits.max(-1)
        return best.indices, (best.values - logits.logsumexp(-1)).exp()
    probs = (logits / temperature).softmax(-1)
    return winner(probs, torch.tensor([keys_of(seed, place) for place in places])), probs.amax(-1)


def _continued(draft: Any, cache: Any, held: Any, tokens: Any, temperature: float, seed: int) -> tuple[Any, Any]:
    """Confidence (rows, DEPTH) and tokens of the draft as it continues ``tokens`` (rows,), each of which follows the
    first ``held`` + 1 tokens of the text in ``cache``."""
    import torch

    length, rows = cache.get_seq_length(), len(tokens)
    cache.batch_repeat_interleave(rows)
    visible = torch.arange(length)[None] <= held[:, None]
    found, said = [], []
    for step in range(DEPTH):
        visible = torch.cat([visible, torch.ones(rows, 1, dtype=torch.bool)], 1)
        hidden = torch.full(visible.shape, torch.finfo(torch.float32).min).masked_fill(visible, 0.0)
        output = draft(
            tokens[:, None],
            attention_mask=hidden[:, None, None],
            position_ids=(held + 1 + step)[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits = output.logits[:, -1].float()
        tokens, sure = _chosen(logits, (held + 2 + step).tolist(), temperature, seed)
        found.append(sure)
        said.append(tokens)
    return torch.stack(found, 1), torch.stack(said, 1)


def adapted(folder: Path, texts: list[Text]) -> Any:
    """The draft distilled on these answers, its adapter merged; the last fifth chooses the checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    from adaptive.types import SamplingParams
    from trainers.dataset import Example
    from trainers.fit import fit
    from trainers.lora import attach, restore
    from trainers.recipe import Recipe
    from trainers.replay import acceptance_rate, replay

    model = attach(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), Recipe())
    found = [
        Example(i, "", np.array(p, np.int32), np.array(o, np.int32), SamplingParams(), limited, None)
        for i, (p, o, limited) in enumerate(texts)
    ]
    held_out = found[len(found) * 4 // 5 :]
    result = fit(
        model, found[: len(found) * 4 // 5], lambda _: acceptance_rate(replay(model, held_out)), Recipe(epochs=8)
    )
    assert result.best is not None, "the distillation taught the draft nothing"
    restore(model, result.best)
    return model.merge_and_unload().eval()


def main() -> None:
    """Log every kind with the draft; some also with random weights, and with an adapter made from their first half."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bundled = Path(__file__).resolve().parent.parent / "checkpoints" / "bundled"
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.gz chat records")
    parser.add_argument(
        "--out", type=Path, required=True, help="the .npz file; what is in it already, and answers beside it, is kept"
    )
    parser.add_argument("--target", type=Path, default=bundled / "target")
    parser.add_argument("--draft", type=Path, default=bundled / "draft")
    parser.add_argument("--generations", type=int, default=200, help="answers of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=150)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 the kinds alone are logged")
    parser.add_argument("--rewrites", type=int, default=60, help="files of which the answer is a changed copy")
    parser.add_argument(
        "--turns", type=int, default=40, help="tool calls in a growing conversation, where its context has room"
    )
    parser.add_argument("--conversations", type=int, default=1, help="such conversations, one after the other")
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 for all cores")
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=torch.float32).eval()
    book = Logbook(args, target, tokenizer)
    drawn = args.temperature > 0
    made = {} if drawn else {"rewrites": rewrites, "conversation": conversation}
    for kind, texts_of in made.items():
        book.add(kind, functools.partial(texts_of, target, tokenizer, args), draft)
    for kind in sorted(file.name.removesuffix(".jsonl.gz") for file in args.data.glob("*.jsonl.gz")):
        book.log(kind, kind, lambda texts: draft)
        if kind in USELESS and not drawn:
            torch.manual_seed(0)
            book.log(f"{kind}+useless", kind, lambda texts: AutoModelForCausalLM.from_config(draft.config).eval())
        if kind in ADAPTED and not drawn:
            book.log(f"{kind}+adapter", kind, lambda texts: adapted(args.draft, texts[: len(texts) // 2]))


class Logbook:
    """The workloads logged so far, in their file. A name already in it is not logged again."""

    def __init__(self, args: argparse.Namespace, target: Any, tokenizer: Any) -> None:
        self.args, self.target, self.tokenizer = args, target, tokenizer
        self.workloads = load(args.out) if args.out.exists() else {}

    def add(self, name: str, texts: Callable[[], list[Text]], draft: Any) -> None:
        """Log ``name``: these texts with ``draft``."""
        if name not in self.workloads:
            self._keep(name, texts(), draft)

    def log(self, name: str, kind: str, model: Callable[[list[Text]], Any]) -> None:
        """Log ``name``: the answers of ``kind`` with the model that ``model`` makes from them."""
        if name in self.workloads:
            return
        texts = answered(self.target, self.tokenizer, self.args, kind)
        self._keep(name, texts, model(texts))

    def _keep(self, name: str, texts: list[Text], draft: Any) -> None:
        temperature = self.args.temperature
        traces = self.workloads[name] = [trace_of(draft, *text, temperature) for text in texts]
        save(self.args.out, self.workloads)
        rate = np.concatenate([t.accepted for t in traces]).mean()
        tokens = sum(len(t.accepted) for t in traces)
        print(f"{name:28} {len(texts):4} generations  {tokens:6} tokens  {rate:.3f} of positions accepted", flush=True)


def rewrites(target: Any, tokenizer: Any, args: argparse.Namespace) -> list[Text]:
    """Prompts to rename one name in a file; the answer is the file with that change. No bundled model can do that, so
    the answer is given, and the draft is judged against it token by token."""
    with gzip.open(args.data / "code_instructions.jsonl.gz", "rt", encoding="utf-8") as file:
        files = [json.loads(line)["messages"][1]["content"] for line in file]
    files = sorted({text for text in files if 300 < len(text) < 1500 and text.count("\n") > 8})
    found = []
    for number in np.random.default_rng(5).permutation(len(files))[: args.rewrites]:
        text = files[number]
        words = {w for w in "".join(c if c.isidentifier() else " " for c in text).split() if len(w) > 3}
        old = max(sorted(words), key=text.count)
        asked = f"Rename {old} to {old}_new in this file and repeat the rest.\n{text}"
        prompt = _prompt(tokenizer, [{"role": "user", "content": asked}])
        found.append((prompt, tokenizer.encode(text.replace(old, f"{old}_new"), add_special_tokens=False), False))
    return found


def conversation(target: Any, tokenizer: Any, args: argparse.Namespace) -> list[Text]:
    """Successive tool calls in a few growing conversations; the first message of each contains a schema of its own."""
    by_schema: dict[str, list[str]] = {}
    with gzip.open(args.data / "tool_calls.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            *head, task = json.loads(line)["messages"][0]["content"].rsplit("\n", 1)
            by_schema.setdefault("".join(head), []).append(task)
    found: list[Text] = []
    for schema, tasks in sorted(by_schema.items(), key=lambda item: -len(item[1]))[: args.conversations]:
        said: list[dict[str, str]] = []
        for number, task in enumerate(tasks[: args.turns]):
            said.append({"role": "user", "content": task if number else f"{schema}\n{task}"})
            prompt = _prompt(tokenizer, said)
            if len(prompt) + LONGEST_CALL > target.config.max_position_embeddings:
                break
            ((_, answer),) = answers(target, [prompt], LONGEST_CALL, tokenizer.pad_token_id, tokenizer.eos_token_id)
            if len(answer) >= 3:
                found.append((prompt, answer, len(answer) == LONGEST_CALL))
            said.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    return found


def _prompt(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def answered(target: Any, tokenizer: Any, args: argparse.Namespace, kind: str) -> list[Text]:
    """Prompts of one kind with the target's answers, cut at their first loop. Answers are kept beside the output file
    and reused."""
    from trainers.dataset import loop_start, repeated_ngrams

    prompts = openings(args.data, kind, args.generations, tokenizer)
    kept = args.out.with_name(f"{args.out.stem}-{kind}-answers.json")
    if kept.exists():
        outputs = json.loads(kept.read_text())
    else:
        special = tokenizer.pad_token_id, tokenizer.eos_token_id
        made = dict(answers(target, prompts, args.max_new_tokens, *special, args.temperature))
        outputs = [made[i] for i in range(len(prompts))]
        kept.write_text(json.dumps(outputs))
    texts = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = np.array(output, np.int32)
        cut = loop_start(repeated_ngrams(tokens), len(tokens))
        if cut >= 3:
            texts.append((prompt, output[:cut], cut == len(output) == args.max_new_tokens))
    return texts


if __name__ == "__main__":
    main()
