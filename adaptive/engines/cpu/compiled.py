"""``--compile``: short passes of a lean forward as machine code of their own, made once for a machine.

In: lean forwards, the passes wanted of each, a folder. Out: passes that are installed in the forwards as
they become ready: at once where an earlier start left them in the folder, else after another process has
compiled them (``compiled_graph.py``). The eager pass answers until then and for every other number of tokens.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from adaptive import isolated
from adaptive.engines.cpu import compiled_graph
from adaptive.engines.cpu.cache import LeanCache
from adaptive.engines.cpu.compiled_graph import BLUEPRINT, JOBS, Block, Blueprint, Constant, Job, Norm
from adaptive.engines.cpu.layers import HeadNorm, LayerNorm, Map, RmsNorm
from adaptive.engines.cpu.plan import Plan
from adaptive.engines.cpu.weights import PackedLinear
from adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from adaptive.engines.cpu.forward import LeanForward

logger = logging.getLogger("adaptive.engines")

# Passes as (tokens, rows of logits), the most frequent first. A target verifies short proposals with a row
# for each token; every further number costs its seconds of compiling once, and is rarely asked for.
OF_TARGET = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (9, 9))
# A draft takes one token, or two after a proposal that was accepted whole.
OF_DRAFT = ((1, 1), (2, 1))

# Weights of a product up to which a single row is written out. At 360,000 that took 0.8 of oneDNN's time, at a
# million 1.3 of it: larger ones are read from memory at its pace, smaller ones wait for its ten microseconds.
WRITTEN_OUT = 1 << 19

# Activations by the name of transformers' class.
ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
}

Pass = tuple[int, int]
Weights = dict[str, torch.Tensor]


class CompiledPass:
    """A pass over a fixed number of tokens. Its weights are those that ``constants`` gave it, by reference."""

    def __init__(self, path: Path, constants: Weights) -> None:
        """Raises RuntimeError where the file is not a package for this torch."""
        package = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
        self._load, self._run = package.load_constants, package.loader.boxed_run
        self._constants = constants
        self._load(constants, check_full_update=True, user_managed=True)

    def update(self, constants: Weights) -> None:
        """Use these from now on, for those of the same names."""
        self._constants = {**self._constants, **constants}
        self._load(self._constants, check_full_update=True, user_managed=True)

    def __call__(
        self, tokens: torch.Tensor, places: torch.Tensor, turns: torch.Tensor, cache: LeanCache
    ) -> torch.Tensor:
        """Logits (rows, vocab); arguments as in ``compiled_graph.Graph``."""
        logits: torch.Tensor = self._run([tokens, places, turns, *cache.layers])[0]
        return logits


def constants(plan: Plan, count: int, rows: int, only: frozenset[PackedLinear] | None = None) -> Weights:
    """The weights of a pass over ``count`` tokens by their names in the graph; with ``only``, of these products."""
    found: Weights = {}
    for name, linear in _products(plan):
        if only is None or linear in only:
            found |= product_constants(name, linear, rows if name == "head" else count)
    if only is not None:
        return found
    found["embed"] = plan.embed.weight
    for name, norm in _norms(plan):
        for part in ("weight", "bias"):
            tensor = getattr(norm, part, None)
            if tensor is not None:
                found[f"{name}_{part}"] = tensor
    return {name: tensor.detach() for name, tensor in found.items()}


def product_constants(name: str, linear: PackedLinear, rows: int) -> Weights:
    """The weights of one product, in the form that is fastest for so many rows.

    One row of a small matrix is written out over the modules' own weights (parts, in an order), which saves
    handing it to oneDNN; all else is oneDNN's, over the packed weight.
    """
    found: dict[str, torch.Tensor | None] = {f"{name}_bias": linear.bias}
    size = sum(module.get_parameter("weight").numel() for module in linear.modules)
    reordered = linear.reordered() if rows > 1 or size > WRITTEN_OUT else None
    if reordered is not None:
        found[f"{name}_packed"] = reordered
    else:
        found |= {f"{name}_part{i}": module.get_parameter("weight") for i, module in enumerate(linear.modules)}
        found[f"{name}_order"] = linear.order
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def _products(plan: Plan) -> Iterator[tuple[str, PackedLinear]]:
    for number, layer in enumerate(plan.layers):
        yield f"layer{number}_project", layer.project
        yield f"layer{number}_output", layer.output
        yield f"layer{number}_up", layer.mix.up
        yield f"layer{number}_down", layer.mix.down
    yield "head", plan.head


def _norms(plan: Plan) -> Iterator[tuple[str, Map | None]]:
    for number, layer in enumerate(plan.layers):
        for name in ("attention_norm", "head_norm", "attention_post_norm", "mix_norm", "mix_post_norm"):
            yield f"layer{number}_{name}", getattr(layer, name)
    yield "final_norm", plan.final_norm


def compilable(plan: Plan) -> bool:
    """Whether the graph knows everything that this model computes. It has no int8 products: torch's fastest ones
    cannot be called from compiled code, and those that can are slower by more than compiling saves."""
    return not plan.head.int8 and all(layer.mix.activation in ACTIVATIONS for layer in plan.layers)


def blueprint(plan: Plan, count: int, rows: int, threads: int) -> Blueprint:
    """What is to be compiled, for a plan that is ``compilable``."""

    def norm(one: object) -> Norm:
        if isinstance(one, LayerNorm):
            return Norm(True, one.eps)
        assert isinstance(one, (RmsNorm, HeadNorm))
        return Norm(False, float(one.side) ** 2)

    blocks = tuple(
        Block(
            attention_norm=norm(layer.attention_norm),
            head_norm=None if layer.head_norm is None else norm(layer.head_norm),
            attention_post_norm=None if layer.attention_post_norm is None else norm(layer.attention_post_norm),
            mix_norm=norm(layer.mix_norm),
            mix_post_norm=None if layer.mix_post_norm is None else norm(layer.mix_post_norm),
            gated=layer.mix.gated,
            activation=ACTIVATIONS[layer.mix.activation],
            scale=layer.scale,
            rope=layer.rope,
            window=layer.window,
            score_cap=layer.score_cap,
            parallel=layer.parallel,
        )
        for layer in plan.layers
    )
    return Blueprint(
        count=count,
        rows=rows,
        blocks=blocks,
        final_norm=norm(plan.final_norm),
        constants=tuple(
            Constant(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in constants(plan, count, rows).items()
        ),
        heads=plan.heads,
        key_heads=plan.key_heads,
        head_size=plan.head_size,
        ropes=len(plan.ropes),
        embed_factor=None if plan.embed.factor is None else float(plan.embed.factor),
        logit_cap=plan.logit_cap,
        context_length=plan.context_length,
        dtype=str(plan.dtype).removeprefix("torch."),
        several=threads > 1,
    )


def key(wanted: Blueprint) -> str:
    """Names the package of a blueprint: another torch, processor or way of computing makes another one."""
    here = [torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()]
    if hasattr(torch.cpu, "get_capabilities"):
        here.append(repr(sorted(torch.cpu.get_capabilities().items())))
    digest = hashlib.sha256(" ".join(here).encode())
    digest.update(Path(compiled_graph.__file__).read_bytes())
    digest.update(BLUEPRINT.dump_json(wanted))
    return digest.hexdigest()[:24]


class Compilation:
    """The passes of a pair that are compiled or being compiled. ``missing`` are those that were not in the folder
    at the start, ``problem`` says in a line why the rest of them stays eager."""

    def __init__(self, wanted: Iterable[tuple[LeanForward, Sequence[Pass]]], folder: Path) -> None:
        """Install what ``folder`` holds, and begin to compile the rest in the background; the forwards' plans are
        ``compilable``. Raises AdaptiveError where there is something to compile and no compiler, or the folder
        cannot be written."""
        self.problem: str | None = None
        # By the name of the file: two models of the same shapes wait for one.
        self._waiting: dict[str, list[tuple[LeanForward, Pass]]] = {}
        self._folder = folder
        self._stopped = False
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        jobs = []
        for forward, (count, rows) in _in_turns(wanted):
            forward.leave_attention_to_torch()
            plan = blueprint(forward.plan, count, rows, forward.threads.most)
            path = folder / f"{key(plan)}.pt2"
            if path.name in self._waiting:
                self._waiting[path.name].append((forward, (count, rows)))
            elif not self._install(forward, (count, rows), path):
                jobs.append(Job(plan, path))
                self._waiting[path.name] = [(forward, (count, rows))]
        self.missing = len(jobs)
        if jobs:
            _check_compiler()
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise AdaptiveError(
                    f"folder {folder} cannot be written ({error.strerror}); choose another with --state-dir"
                ) from error
            self._thread = threading.Thread(target=self._compile, args=(jobs,), name="compile", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    @property
    def ready(self) -> bool:
        """Whether nothing is being compiled any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Until everything is compiled and installed, or has failed."""
        if self._thread is not None:
            self._thread.join(seconds)

    def stop(self) -> None:
        """Give up what is not finished."""
        self._stopped = True
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    def _install(self, forward: LeanForward, which: Pass, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            forward.install(which, path)
        except RuntimeError as error:  # half a file, or one for another machine
            logger.warning("a compiled pass cannot be loaded and is made anew: %s", str(error).strip().splitlines()[0])
            path.unlink(missing_ok=True)
            return False
        return True

    def _compile(self, jobs: list[Job]) -> None:
        with tempfile.TemporaryFile("w+") as said:
            self._process = process = subprocess.Popen(
                isolated.command(compiled_graph.__name__),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                start_new_session=True,  # ctrl-C stops an answer, not this
            )
            if self._stopped:
                process.terminate()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(JOBS.dump_json(jobs).decode() + "\n")
                process.stdin.close()
            except OSError:
                pass  # it ended at once; its status says so
            for line in process.stdout:
                name, _, failure = line.strip().partition(" ")
                if failure:
                    self._fail(failure)
                elif all(self._install(forward, which, self._folder / name) for forward, which in self._waiting[name]):
                    del self._waiting[name]
            if process.wait() != 0 and not self._stopped:
                said.seek(0)
                lines = said.read().strip().splitlines()
                self._fail(lines[-1] if lines else f"the compiling process ended with status {process.returncode}")
        if self._waiting and not self._stopped:
            logger.warning("--compile: %d passes stay eager: %s", len(self._waiting), self.problem)

    def _fail(self, reason: str) -> None:
        self.problem = self.problem or reason


def _in_turns(wanted: Iterable[tuple[LeanForward, Sequence[Pass]]]) -> Iterator[tuple[LeanForward, Pass]]:
    """Every model's first pass, then every model's second, ..."""
    rows = [[(forward, one) for one in passes] for forward, passes in wanted]
    for turn in range(max(map(len, rows), default=0)):
        yield from (row[turn] for row in rows if turn < len(row))


def _check_compiler() -> None:
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch chooses it
    if shutil.which(name) is None:
        raise AdaptiveError(
            f"--compile needs a C++ compiler, and {name} is not here; install one, name it in CXX, or leave this out"
        )
