"""Trains the bundled pair from scratch: tokenizer, target, draft, prompts, model card.

In:  a folder of chat records (``*.jsonl.gz``, one ``{"messages": [...]}`` a line).
Out: ``OUT/target``, ``OUT/draft`` (Hugging Face checkpoints, bf16 safetensors), ``OUT/prompts``
     (held-out prompts by kind) and ``OUT/README.md`` (the model card, with figures measured by this script).

    python scripts/train_bundled.py --data DATA --out checkpoints/bundled

The target is trained on every kind of text, the draft only on ``DRAFT_KINDS``, so that it can learn the other kinds
from a user's own prompts. A prompt is held out by its hash, so that no prompt is both trained on and held out,
whatever the order of the files.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

KINDS = {
    "math": "gsm8k_train",
    "code": "code_instructions",
    "roleplay": "roleplay",
    "tools": "tool_calls",
    "hard": "hard_prompts",
    "blog": "blog_prompts",
    "instructions": "instructions_1k",
    "stories": "stories",
}
DRAFT_KINDS = ("code", "roleplay", "hard", "blog", "instructions", "stories")
# Kinds with enough different held-out prompts to be worth shipping.
PROMPT_KINDS = ("math", "code", "roleplay", "tools", "instructions")
LICENCES = {
    "math": "openai/grade-school-math, train split; MIT",
    "code": "sahil280114/codealpaca, new_codealpaca; Apache-2.0",
    "roleplay": "GPTeacher role-play, in gururise/AlpacaDataCleaned; MIT",
    "tools": "GPTeacher Toolformer, in gururise/AlpacaDataCleaned; MIT",
    "hard": "lmarena arena-hard-auto v0.1; Apache-2.0",
    "blog": "lm-sys/vicuna-blog-eval; Apache-2.0",
    "instructions": "LLaMA-Factory demo set; Apache-2.0",
    "stories": "TinyStories texts, ToonTalk/jlens-tinystories; MIT",
}
VOCAB = 4096
ROW = 1024  # tokens in one training row
BATCH_ROWS = 4
SPECIAL = ["<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TARGET_SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 16, "num_attention_heads": 4}
DRAFT_SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 1, "num_attention_heads": 4}


@dataclass(frozen=True)
class Chat:
    """One chat record and the kind of text it belongs to."""

    kind: str
    messages: list[dict[str, str]]

    @property
    def held_out(self) -> bool:
        """About one prompt in twenty, chosen by hash; stories share one prompt, so their text counts."""
        key = self.messages[0]["content"]
        if self.kind == "stories":
            key = self.messages[1]["content"]
        return hashlib.sha256(key.encode()).digest()[0] < 13


def read_chats(data: Path) -> list[Chat]:
    """Every record of every kind under ``data``."""
    chats = []
    for kind, name in KINDS.items():
        with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            chats += [Chat(kind, json.loads(line)["messages"]) for line in file]
    return chats


def train_tokenizer(chats: list[Chat]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``VOCAB`` entries. Each digit is a token of its own, so that numbers have one spelling."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (m["content"] for chat in chats if not chat.held_out for m in chat.messages)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, chats: list[Chat]) -> list[list[int]]:
    """Token ids of every chat in the chat template."""
    texts = [tokenizer.apply_chat_template(chat.messages, tokenize=False) for chat in chats]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def rows(documents: list[list[int]], kinds: list[str], rng: random.Random) -> Iterator[torch.Tensor]:
    """Endless rows (ROW + 1,). A quarter of the chats are joined to another chat of their kind, without a new
    beginning-of-text token, so that the models see chats of several turns."""
    by_kind = defaultdict(list)
    for document, kind in zip(documents, kinds, strict=True):
        by_kind[kind].append(document)
    buffer: list[int] = []
    while True:
        order: list[list[int]] = []
        for members in by_kind.values():
            joined: list[list[int]] = []
            for document in rng.sample(members, len(members)):
                if joined and rng.random() < 0.25 and len(joined[-1]) + len(document) < ROW:
                    joined[-1] = joined[-1] + document[1:]
                else:
                    joined.append(document)
            order += joined
        rng.shuffle(order)
        for document in order:
            buffer += document
            while len(buffer) > ROW:
                yield torch.tensor(buffer[: ROW + 1])
                buffer = buffer[ROW:]


def new_model(shape: dict[str, Any], tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of this shape with fresh weights (float32)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=shape["num_attention_heads"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    return LlamaForCausalLM(config)


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate, falling linearly to zero; ``train`` adds a warm-up of 50 steps."""
    return max(0.0, 1 - step / steps)


def train(
    model: LlamaForCausalLM,
    source: Iterator[torch.Tensor],
    tokens: int,
    save: Path,
    tokenizer: PreTrainedTokenizerFast,
    done: int = 0,
) -> None:
    """Train on ``tokens`` tokens. ``done`` steps were made before an interruption: data and schedule continue from
    there, the optimisers' state starts anew."""
    steps = math.ceil(tokens / (ROW * BATCH_ROWS))
    both = optimizers(model)
    peaks = [group["lr"] for optimizer in both for group in optimizer.param_groups]
    began, smooth = time.time(), 0.0
    model.train()
    for _ in range(done * BATCH_ROWS):
        next(source)
    for step in range(done, steps):
        batch = torch.stack([next(source) for _ in range(BATCH_ROWS)])
        inputs, labels = batch[:, :-1], batch[:, 1:].reshape(-1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs, use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = schedule(step, steps) * min(1.0, (step - done + 1) / 50)
        groups = [group for optimizer in both for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * share
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if step == done else 0.95 * smooth + 0.05 * loss.item()
        if step % 20 == 0 or step == steps - 1:
            rate = (step - done + 1) * ROW * BATCH_ROWS / (time.time() - began)
            print(f"step {step + 1}/{steps}  loss {smooth:.4f}  {rate:.0f} tokens/s", flush=True)
        if step % 200 == 199:
            store(model, tokenizer, save)
    store(model, tokenizer, save)


def store(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint in bf16 with its tokenizer; the model itself stays in float32."""
    half = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config)
    nn.Module.to(copy, torch.bfloat16)  # the model's own ``to`` is mistyped
    copy.load_state_dict(half)
    copy.config.dtype = torch.bfloat16
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, documents: list[list[int]]) -> float:
    """Mean cross-entropy in nats per token over whole chats."""
    model.eval()
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor(document[:ROW])[None]
        logits = model(ids).logits[0, :-1].float()
        total += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


@torch.no_grad()
def overlap(draft: LlamaForCausalLM, target: LlamaForCausalLM, documents: list[list[int]]) -> float:
    """Expected acceptance at temperature 1 on this text: mean over positions of sum min(p, q)."""
    draft.eval(), target.eval()
    values = []
    for document in documents:
        ids = torch.tensor(document[:ROW])[None]
        p, q = (m(ids).logits[0].float().softmax(-1) for m in (target, draft))
        values.append(torch.minimum(p, q).sum(-1))
    return float(torch.cat(values).mean())


def write_prompts(chats: list[Chat], folder: Path) -> None:
    """Write the held-out prompts of each kind, at most 320 a kind. Neither model is trained on them."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        if kind not in PROMPT_KINDS:
            continue
        prompts = list(dict.fromkeys(c.messages[0]["content"] for c in chats if c.kind == kind and c.held_out))
        lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts[:320]]
        (folder / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_card(out: Path, chats: list[Chat], tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
    """Write the model card, with losses measured now on the stored weights."""
    target = LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    draft = LlamaForCausalLM.from_pretrained(out / "draft", dtype=torch.float32)
    table = [
        "| kind | source and licence | draft trained on it | target loss | draft loss | overlap |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        held = encode(tokenizer, [c for c in chats if c.kind == kind and c.held_out][:60])
        table.append(
            f"| {kind} | {LICENCES[kind]} | {'yes' if kind in DRAFT_KINDS else 'no'} | "
            f"{held_out_loss(target, held):.3f} | {held_out_loss(draft, held):.3f} | "
            f"{overlap(draft, target, held):.3f} |"
        )
    sizes = {name: sum(p.numel() for p in m.parameters()) / 1e6 for name, m in (("target", target), ("draft", draft))}
    recipe = (
        f"python scripts/train_bundled.py --data DATA --out checkpoints/bundled "
        f"--target-tokens {args.target_tokens} --draft-tokens {args.draft_tokens} --seed {args.seed}"
    )
    card = f"""# The bundled pair

A Llama-architecture chat model of {sizes["target"]:.1f} million parameters ({TARGET_SHAPE["num_hidden_layers"]} layers)
and a draft of {sizes["draft"]:.2f} million (one layer), with one tokenizer (byte-level BPE, {len(tokenizer)} entries)
and one chat template. They exist so that the demo, the tests and the benchmarks run with no download.

**What it is not.** Not an assistant: at this size its answers are fluent and mostly wrong, sums above all.
Nothing measured on it says how another pair does; to know that, measure that pair.

## Data

About one prompt in twenty is held out by its hash and was seen by neither model. Losses are in nats per
token over up to 60 held-out chats a kind; overlap is the mean over positions of sum min(p, q), the
expected acceptance at temperature 1 on that text.

{chr(10).join(table)}

`prompts/` holds held-out prompts of some kinds, under the licence of their source.

## Recipe

`{recipe}`

Two CPU cores; bf16 autocast over float32 weights, rows of {ROW} tokens, {BATCH_ROWS} rows a step, Muon (0.02) for
matrices and AdamW (0.003) for the rest, 50 steps of warm-up and a linear decay; cross-entropy on the text:
all kinds for the target, {", ".join(DRAFT_KINDS)} only for the draft. Seed {args.seed} for
data and weights. {args.note}

The weights are under Apache-2.0.
"""
    (out / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.gz chat records")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/bundled"))
    parser.add_argument("--target-tokens", type=int, default=9_000_000)
    parser.add_argument("--draft-tokens", type=int, default=4_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume-step", type=int, default=0, help="go on with OUT/target, stored after this step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="", help="what else the model card should say of this training")
    parser.add_argument("--stages", default="tokenizer,target,draft,card", help="which of them to run")
    args = parser.parse_args()
    stages = args.stages.split(",")
    torch.set_num_threads(args.threads)

    chats = read_chats(args.data)
    seen = [chat for chat in chats if not chat.held_out]
    if "tokenizer" in stages:
        train_tokenizer(chats).save_pretrained(args.out / "target")
        write_prompts(chats, args.out / "prompts")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "target")
    if "target" in stages:
        if args.resume_step:
            target = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.float32)
        else:
            target = new_model(TARGET_SHAPE, tokenizer, args.seed)
        source = rows(encode(tokenizer, seen), [c.kind for c in seen], random.Random(args.seed))
        train(target, source, args.target_tokens, args.out / "target", tokenizer, done=args.resume_step)
    if "draft" in stages:
        part = [chat for chat in seen if chat.kind in DRAFT_KINDS]
        source = rows(encode(tokenizer, part), [c.kind for c in part], random.Random(args.seed))
        train(new_model(DRAFT_SHAPE, tokenizer, args.seed), source, args.draft_tokens, args.out / "draft", tokenizer)
    if "card" in stages:
        write_card(args.out, chats, tokenizer, args)


if __name__ == "__main__":
    main()
