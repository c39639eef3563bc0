"""Runs the whole process with a real llama-server: requests through `adaptive learn`, `adaptive distill`, then
`adaptive publish`.

    python benchmarks/upstream_publish.py --server llama-server --work FOLDER [--target INFLATED] [--encoding q8_0]
                                          [--kind tools] [--requests 400] [--unseen 40] [--tokens 100] [--threads 2]
                                          [--slots 1]

The server runs the target without a draft. Real clients request ``--requests`` answers of one kind through the proxy,
at ``--temperature``, ``--slots`` at a time; the last ``--unseen`` prompts of the kind are held out, and the others are
repeated as needed. A draft is distilled from the log and published, with a restart of the server. Then servers without
a draft, with the undistilled draft at several lengths and with the published draft answer the held-out prompts
greedily, in turn, each timed by its own ``timings``. A second run with the same ``--work`` continues where the first
one ended.
Prints one JSON object, and its table as Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from served import end_when_terminated
from transformers import AutoModelForCausalLM, AutoTokenizer
from upstream import BUNDLED, started, wait_until_ready

from adaptive.engines.hf.lora import MergedAdapter
from adaptive.upstream.kinds import LLAMA_SERVER
from adaptive.upstream.measure import Answered, Measured, measure
from checkpoints.store import AdapterStore
from cli.publish_replay import answered_examples, expected_acceptance
from trainers.dataset import loop_start, repeated_ngrams
from trainers.replay import replay

# Draft lengths of the undistilled draft.
LENGTHS = (1, 2, 4)


@dataclass(frozen=True)
class Work:
    """The given models and options, and the folder of everything that is made."""

    folder: Path
    server: str
    target: Path
    draft: Path
    encoding: str
    threads: int
    tokens: int
    slots: int

    @property
    def pair(self) -> tuple[str, ...]:
        """The options that name the pair and its state."""
        return ("--target", str(self.target), "--draft", str(self.draft), "--state-dir", str(self.folder / "learn"))

    def gguf(self, role: str) -> Path:
        """The GGUF file of a model of the pair, named as `adaptive export` names it."""
        return self.folder / "gguf" / f"{getattr(self, role).name}-{self.encoding}.gguf"

    def command(self, port: int, *options: str, slots: int = 1) -> str:
        """The command that starts the server."""
        words = [self.server, "--model", str(self.gguf("target")), "--host", "127.0.0.1", "--port", str(port)]
        words += ["--ctx-size", str(2048 * slots), "--parallel", str(slots), "--threads", str(self.threads), *options]
        return shlex.join(words)


def adaptive(*arguments: str, stdout: int | None = subprocess.PIPE) -> str:
    """Run one of our commands and return its output. Status 1 means that a publication was rolled back."""
    done = subprocess.run([sys.executable, "-m", "cli.main", *arguments], stdout=stdout, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"adaptive {arguments[0]} ended with status {done.returncode}")
    return done.stdout or ""


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def restartable(work: Work, slots: int = 1) -> Iterator[tuple[str, Path, str]]:
    """Run the server from a start file by a restart command, as users do. Yields its address and these two."""
    port, start, pid = free_port(), work.folder / "start.sh", work.folder / "pid"
    start.write_text(f"exec {work.command(port, slots=slots)} > {shlex.quote(str(work.folder / 'server.txt'))} 2>&1\n")
    again = work.folder / "restart.sh"
    again.write_text(
        f"if [ -e {pid} ]; then kill $(cat {pid}); while kill -0 $(cat {pid}) 2>/dev/null; do sleep 0.1; done; fi\n"
        f"sh {start} &\necho $! > {pid}\n"
    )
    url, command = f"http://127.0.0.1:{port}", f"sh {again}"
    pid.unlink(missing_ok=True)
    subprocess.run(command, shell=True, check=True)
    try:
        until_up(url)
        yield url, start, command
    finally:
        os.kill(int(pid.read_text()), signal.SIGTERM)


def until_up(url: str) -> None:
    """Wait until a server listens there and has loaded its model."""
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            wait_until_ready(url)
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} does not come up")


def ask(url: str, prompts: Sequence[str], requests: int, temperature: float, work: Work) -> dict[str, Any]:
    """Let real clients request answers to ``prompts`` in turn, every other one streamed. Returns the proxy's status."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
        model = client.models.list().data[0].id

        def one(number: int) -> None:
            said: Any = {
                "model": model,
                "messages": [{"role": "user", "content": prompts[number % len(prompts)]}],
                "max_tokens": work.tokens,
                "temperature": temperature,
                "seed": number,
            }
            if number % 2:
                list(client.chat.completions.create(**said, stream=True))
            else:
                client.chat.completions.create(**said)

        with ThreadPoolExecutor(work.slots + 1) as pool:  # one more, so that the next request waits
            list(pool.map(one, range(requests)))
    for _ in range(600):
        said: dict[str, Any] = httpx.get(f"{url}/adaptive/upstream").json()
        if said["log"].get("logged", 0) + said["log"].get("missed", 0) >= requests:
            return said
        time.sleep(0.1)
    raise SystemExit(f"the log has not come to {requests} answers: {said}")


def race(work: Work, contenders: dict[str, tuple[str, ...]], prompts: Sequence[Sequence[int]]) -> dict[str, Measured]:
    """Measure servers with these options on the same prompts, in rotating order."""
    answers: dict[str, list[Answered]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack:
        urls = {}
        for name, options in contenders.items():
            port = free_port()
            process = subprocess.Popen(
                shlex.split(work.command(port, *options)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            urls[name] = f"http://127.0.0.1:{port}"
            until_up(urls[name])
            measure(urls[name], None, prompts[:1], work.tokens)  # warms up
        names = list(contenders)
        for number, prompt in enumerate(prompts):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                answers[name] += measure(urls[name], None, [prompt], work.tokens).answers
    return {name: summed(found) for name, found in answers.items()}


def summed(answers: Sequence[Answered]) -> Measured:
    """One result from answers that were measured one by one."""
    drafted, accepted = sum(one.drafted or 0 for one in answers), sum(one.accepted or 0 for one in answers)
    return Measured(tuple(answers), drafted, accepted, None)


def draft_options(file: Path, length: int) -> tuple[str, ...]:
    """The server's options for a draft."""
    return ("--spec-type", "draft-simple", "--spec-draft-model", str(file), "--spec-draft-n-max", str(length))


def learn(work: Work, prompts: Sequence[str], requests: int, temperature: float) -> None:
    """Log answers through the proxy and distill a draft from them, unless there is one already."""
    if not work.gguf("target").exists():
        adaptive("export", str(work.folder / "gguf"), "--encoding", work.encoding, *work.pair[:4], stdout=None)
    if any((work.folder / "learn").glob("*/adapters/CURRENT")):
        return
    began = time.perf_counter()
    with (
        restartable(work, work.slots) as (url, _, _),
        started(work.folder, "learn", "--upstream", url, *work.pair, "--distill", "off") as through,
    ):
        status = ask(through, prompts, requests, temperature, work)
    note(work, {"asked_s": time.perf_counter() - began, "proxy": status})
    began = time.perf_counter()
    told = json.loads(adaptive("distill", *work.pair, "--json"))
    note(work, {"distilled_s": time.perf_counter() - began, "distill": told})


def note(work: Work, found: dict[str, Any]) -> None:
    """Keep these results for a later run."""
    file = work.folder / "found.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | found, indent=2))


def publish(work: Work) -> None:
    """Publish to a running server, as a user would."""
    with restartable(work) as (url, start, again):
        told = adaptive(
            "publish", *work.pair, "--upstream", url, "--start", str(start), "--restart", again,
            "--encoding", work.encoding, "--max-tokens", str(work.tokens), "--json",
        )  # fmt: skip
        note(work, {"publish": json.loads(told), "start": start.read_text()})


def unseen(work: Work, prompts: Sequence[str], lengths: Sequence[int]) -> dict[str, Any]:
    """The figures of each server on prompts that were not requested before, and the acceptance that replay predicts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(work.target)
    asked = [
        list[int](
            tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)[
                "input_ids"
            ]
        )
        for prompt in prompts
    ]
    told = json.loads((work.folder / "found.json").read_text())["publish"]
    file, chosen = Path(told["draft"]), int(told["draft_length"])
    contenders = {"plain": (), **{f"draft {k}": draft_options(work.gguf("draft"), k) for k in lengths}}
    contenders[f"published {chosen}"] = draft_options(file, chosen)
    measured = race(work, contenders, asked)
    (folder,) = {path.parent for path in (work.folder / "learn").glob("*/adapters")}
    store = AdapterStore(folder / "adapters")
    rows: dict[str, dict[str, Any]] = {}
    for name, one in measured.items():
        model = AutoModelForCausalLM.from_pretrained(work.draft, dtype="float32")
        if name.startswith("published"):
            MergedAdapter(model).apply(store.path(told["adapter"]))
        known = answered_examples(tokenizer, asked, one)
        length = 0 if name == "plain" else int(name.split()[1])
        replayed = replay(model, known) if length else []
        rows[name] = {
            "tokens_per_second": one.tokens_per_second,
            "acceptance": one.acceptance,
            "replay": expected_acceptance(replayed, length, LLAMA_SERVER, work.tokens),
            "tokens": sum(answer.tokens for answer in one.answers),
            "same": sum(a.text == b.text for a, b in zip(one.answers, measured["plain"].answers, strict=True)),
            "looping": sum(loop_start(repeated_ngrams(e.output), len(e.output)) < len(e.output) for e in known),
        }
    best = max(row["tokens_per_second"] for name, row in rows.items() if not name.startswith("published"))
    gain = rows[f"published {chosen}"]["tokens_per_second"] / best
    return {"rows": rows, "gain": gain, "published": told}


def table(found: dict[str, Any], prompts: int) -> str:
    """The rows as a Markdown table."""
    lines = ["| llama-server | tokens/s | accepted of drafted | replay | same answers |", "|---|---|---|---|---|"]
    for name, row in found["rows"].items():
        shares = ["" if row[key] is None else f"{row[key]:.3f}" for key in ("acceptance", "replay")]
        lines.append(f"| {name} | {row['tokens_per_second']:.1f} | {' | '.join(shares)} | {row['same']} of {prompts} |")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, run the whole process, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="llama-server")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is made")
    parser.add_argument("--target", type=Path, default=BUNDLED / "target")
    parser.add_argument("--draft", type=Path, default=BUNDLED / "draft")
    parser.add_argument("--encoding", default="bf16")
    parser.add_argument("--kind", default="tools")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--unseen", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=1, help="answers at once while they are logged; raced one by one")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--until", choices=("distilled", "published", "raced"), default="raced")
    given = parser.parse_args()
    end_when_terminated()
    given.work.mkdir(parents=True, exist_ok=True)
    work = Work(
        given.work.resolve(), given.server, given.target.resolve(), given.draft.resolve(), given.encoding,
        given.threads, given.tokens, given.slots,
    )  # fmt: skip
    with (BUNDLED / "prompts" / f"{given.kind}.jsonl").open(encoding="utf-8") as lines:
        prompts = [str(json.loads(line)["prompt"]) for line in lines]
    learn(work, prompts[: -given.unseen], given.requests, given.temperature)
    if given.until != "distilled" and "publish" not in json.loads((work.folder / "found.json").read_text()):
        publish(work)
    if given.until == "raced":
        found = unseen(work, prompts[-given.unseen :], [int(part) for part in given.lengths.split(",")])
        note(work, {"unseen": found})
        print(json.dumps(found, indent=2))
        print(table(found, given.unseen))


if __name__ == "__main__":
    main()
