"""Checks that an exported adapter and a merged draft have in llama-server the acceptance that replay predicts.

    python benchmarks/llamacpp_export.py --server llama-server --target T.gguf --draft D.gguf --adapter FOLDER
                                         --adapter-gguf A.gguf --merged M.gguf [--kind tools] [--count 40]

The target answers prompts greedily; replay of the adapted draft predicts how many of K drafted tokens a round are
accepted. llama-server then speculates with the merged file on the same prompts, and its own counts are
compared. llama-server applies no adapter to a draft. So the exported adapter is loaded on the draft, served as a
model of its own, and the next token is requested at every position of the answers; the share of tokens equal to
the target's is the acceptance rate.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from llamacpp import Server

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength
from adaptive.pair import BUNDLED, load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from cli.prompts import read_prompts
from trainers.replay import Replay, acceptance_rate, expected_rounds


def end_uncounted(replay: Replay, length: int) -> bool:
    """Whether the end of a greedy answer is drafted and accepted but not counted: llama-server stops checking a draft
    where the answer ends, and counts the end as accepted only in the last place of the draft."""
    at, last = 0, replay.positions - 1
    while at <= last and not replay.limited:
        for step in range(length):
            if at > last or not replay.acceptance[0, at]:
                break
            if at == last:
                return step < length - 1
            at += 1
        at += 1
    return False


def main() -> None:
    """Answer the prompts, replay, query the servers, print both acceptance rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("server", "target", "draft", "adapter-gguf", "merged"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--kind", default="tools")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--lengths", default="2,4")
    args = parser.parse_args()

    pair = load_pair(load_settings({"target": args.target, "draft": args.draft}))
    assert pair.draft is not None
    pair.draft.apply_adapter(args.adapter)
    prompts = read_prompts(BUNDLED / "prompts" / f"{args.kind}.jsonl")
    random.Random(0).shuffle(prompts)
    assistant = Assistant(pair, FixedLength(0), None)
    texts, replays = [], []
    for number, prompt in enumerate(prompts[: args.count]):
        for _ in assistant.chat(prompt.messages, SamplingParams(), StopParams(args.tokens)):
            pass
        assert assistant.last is not None
        asked, output = encode_chat(pair, prompt.messages), assistant.last.output
        if len(output) < 2:
            continue
        logits = pair.draft.sequence().extend(torch.tensor(asked + output[:-1]), len(output))
        right = (logits.argmax(-1) == torch.tensor(output)).numpy().astype(np.float32)
        replays.append(Replay(number, right[None, 1:], assistant.last.finish_reason == "length"))
        texts.append((asked, output))
    base = ("--threads", str(torch.get_num_threads()))
    server = Server(args.server, "--model", args.draft, "--lora", args.adapter_gguf, *base)
    same = count = 0
    for asked, output in texts[: args.count // 2]:
        for place in range(1, len(output)):
            said = server.ask(
                prompt=asked + output[:place], n_predict=1, temperature=0.0, return_tokens=True, cache_prompt=True
            )
            found = said["tokens"] or [pair.tokenizer.eos_token_id]
            same += found[0] == output[place]
            count += 1
    server.close()
    predicted = acceptance_rate(replays[: args.count // 2])
    print(f"adapter beside the draft: {same / count:.3f} of {count} positions, replay says {predicted:.3f}")
    for length in (int(part) for part in args.lengths.split(",")):
        speculate = ("--spec-type", "draft-simple", "--spec-draft-n-max", str(length))
        server = Server(args.server, "--model", args.target, "--spec-draft-model", args.merged, *speculate, *base)
        drafted = accepted = 0
        for asked, _ in texts:
            timings = server.ask(prompt=asked, n_predict=args.tokens, temperature=0.0, cache_prompt=False)["timings"]
            drafted += timings["draft_n"]
            accepted += timings["draft_n_accepted"]
        server.close()
        hits, rounds = expected_rounds(replays, length)
        uncounted = sum(end_uncounted(replay, length) for replay in replays)
        predicted, counted = ((hits.sum() - left) / (length * rounds.sum()) for left in (0, uncounted))
        print(
            f"merged draft, {length} a round: {accepted / drafted:.3f} of {drafted} drafted tokens accepted, replay "
            f"says {predicted:.3f}, {counted:.3f} as the server counts"
        )


if __name__ == "__main__":
    main()
