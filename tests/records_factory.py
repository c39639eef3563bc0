"""Synthetic but complete generations for the tests of the log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from adaptive.types import Generation, Message, Round, SamplingParams, Supervision, Timings

DEFAULT_ROUNDS = (Round("model", 4, 2, 0.01, 0.02), Round("model", 0, 0, 0.0, 0.02))


def generation(
    number: int = 0,
    *,
    session: str = "s",
    created: float | None = None,
    text: str = "an answer",
    asked: str = "a question",
    adapter: str | None = None,
    domain: str | None = None,
    rounds: tuple[Round, ...] = DEFAULT_ROUNDS,
    tokens: int = 5,
    seconds: float = 0.5,
    supervised: bool = True,
    raw: bool = False,
) -> Generation:
    """A generation whose contents are determined by ``number`` and the other arguments."""
    rng = np.random.default_rng(number)
    supervision = Supervision(
        ids=rng.integers(0, 4096, (tokens, 8), dtype=np.int32),
        logprobs=-np.sort(rng.random((tokens, 8))).astype(np.float16),
        rest=np.full(tokens, -np.inf, np.float16),
        chosen=np.zeros(tokens, np.float16),
    )
    return Generation(
        session=session,
        created=1_700_000_000.0 + number if created is None else created,
        messages=() if raw else (Message("user", asked),),
        prompt_text=asked if raw else "",
        text=text,
        prompt=np.arange(number, number + 3, dtype=np.int32),
        output=rng.integers(0, 4096, tokens, dtype=np.int32),
        sampling=SamplingParams(temperature=0.7, seed=number, logit_bias={3: -1.5}),
        adapter=adapter,
        engine="transformers",
        domain=domain,
        finish_reason="stop",
        rounds=rounds,
        timings=Timings(3, 1, 0.25, tokens, seconds),
        supervision=supervision if supervised else None,
    )


def start(code: str, path: Path) -> subprocess.Popen[str]:
    """Run ``code`` as a process of its own. It finds ``path`` in ``sys.argv[1]`` and may import this module."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=here)


def same(one: Generation, other: Generation) -> bool:
    """Whether two generations agree in every field and every bit."""
    for name in one.__dataclass_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, Supervision) and isinstance(b, Supervision):
            if any(getattr(a, f).tobytes() != getattr(b, f).tobytes() for f in a.__dataclass_fields__):
                return False
        elif isinstance(a, np.ndarray):
            if a.dtype != b.dtype or not np.array_equal(a, b):
                return False
        elif a != b:
            return False
    return True
