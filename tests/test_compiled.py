"""Compiled passes compute what eager ones compute, follow an adapter, and are kept on disk.

One process compiles all that the tests of this file need, once.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lean import GROUPED, SIZES, lean
from test_lean import made as random_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.compiled import OF_DRAFT, OF_TARGET, Compilation, compilable
from adaptive.engines.cpu.forward import LeanForward, lean_forward
from adaptive.engines.cpu.kernels import library
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.errors import AdaptiveError
from adaptive.pair import load_pair
from adaptive.settings import load_settings

# By one process, which compiles once.
together = pytest.mark.xdist_group("compiled")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")

KINDS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt-neox")
# By kind of model: (tokens, rows of logits). Every pass takes its ten seconds to compile.
PASSES = dict.fromkeys(KINDS, ((3, 3),)) | {"llama": ((1, 1),), "qwen2": ((2, 1),)}
OFTEN = ("llama", "qwen2", "gemma2")


def made(name: str) -> PreTrainedModel:
    """A checkpoint of random weights in float32."""
    return random_model(name, torch.float32)


def text(length: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(0, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled passes of the models that are tested often."""
    made_in: Path = tmp_path_factory.mktemp("compiled")
    compile_all([(lean(made(name)), PASSES[name]) for name in OFTEN], made_in)
    return made_in


def compile_all(wanted: list[tuple[LeanForward, Any]], into: Path) -> None:
    """Compile, wait, and see that nothing failed."""
    compilation = Compilation(wanted, into)
    compilation.wait()
    assert compilation.problem is None


def both(name: str, folder: Path) -> tuple[LeanForward, LeanForward, PreTrainedModel]:
    """A model's eager forward, and one with its passes from the folder."""
    model = made(name)
    compiled = lean(model)
    assert Compilation([(compiled, PASSES[name])], folder).missing == 0
    return lean(model), compiled, model


def same_logits(eager: LeanForward, compiled: LeanForward, which: tuple[int, int]) -> None:
    """A prompt, then passes that are compiled and others in between, over one cache, and after a rollback."""
    eager.leave_attention_to_torch()  # so that each can go on where the other was
    (count, rows), tokens, caches, done = which, text(90), (eager.cache(), compiled.cache()), 0
    for n in (9, count, count, 5, count, 40, count):
        wanted = rows if n == count else n
        right, got = (
            forward(tokens[done : done + n], wanted, cache)
            for forward, cache in zip((eager, compiled), caches, strict=True)
        )
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
        done += n
    for cache in caches:
        cache.rollback(20)
    got, right = (f(tokens[:count], rows, cache) for f, cache in zip((compiled, eager), caches, strict=True))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


@together
@needs_compiler
@pytest.mark.parametrize("name", OFTEN)
def test_compiled_logits_equal_eager_ones(name: str, folder: Path) -> None:
    eager, compiled, _ = both(name, folder)
    same_logits(eager, compiled, PASSES[name][0])


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in KINDS if name not in OFTEN])
def test_compiled_logits_of_other_kinds_equal_eager_ones(name: str, tmp_path: Path) -> None:
    compile_all([(lean(made(name)), PASSES[name])], tmp_path)
    eager, compiled, _ = both(name, tmp_path)
    same_logits(eager, compiled, PASSES[name][0])


@needs_compiler
@pytest.mark.long
def test_code_for_several_threads_computes_the_same(tmp_path: Path) -> None:
    given = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        eager, compiled = lean(made("llama")), lean(made("llama"))
        compile_all([(compiled, ((1, 1), (3, 3)))], tmp_path)
        for which in ((1, 1), (3, 3)):
            same_logits(eager, compiled, which)
    finally:
        torch.set_num_threads(given)


@together
@needs_compiler
def test_the_compiled_pass_is_the_one_that_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, compiled, _ = both("gemma2", folder)
    cache = compiled.cache()
    compiled(text(9), 1, cache)

    def refuse(*args: Any) -> torch.Tensor:
        raise AssertionError("the eager pass was run")

    monkeypatch.setattr(compiled, "_pass", refuse)
    compiled(text(3), 3, cache)
    with pytest.raises(AssertionError):
        compiled(text(4), 4, cache)


@together
@needs_compiler
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # weights by reference, and packed ones
def test_a_change_of_weights_reaches_compiled_passes(name: str, folder: Path) -> None:
    eager, compiled, model = both(name, folder)
    which = PASSES[name][0]
    changed = frozenset(["model.layers.1.self_attn.k_proj", "model.layers.0.mlp.up_proj", "lm_head"])
    cache = compiled.cache()
    compiled(text(9), 1, cache)
    stale = compiled(text(which[0]), which[1], cache)
    with torch.no_grad():
        for module in changed:
            model.get_submodule(module).get_parameter("weight").mul_(1.5)
    for forward in (eager, compiled):
        forward.refresh(changed)
    same_logits(eager, compiled, which)
    cache.rollback(9)
    assert (compiled(text(which[0]), which[1], cache) - stale).abs().max() > 0.01


@together
@needs_compiler
def test_half_a_file_is_made_anew(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "compiled"
    shutil.copytree(folder, copy)
    for file in copy.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    compilation = Compilation([(lean(made("llama")), PASSES["llama"])], copy)
    assert compilation.missing == 1
    compilation.stop()
    compilation.wait()


def test_what_the_graph_does_not_know_stays_eager() -> None:
    int8 = lean_forward(made("llama"), int8=True)
    relu = AutoModelForCausalLM.from_config(LlamaConfig(**GROUPED, hidden_act="leaky_relu"))
    assert compilable(lean(made("llama")).plan)
    assert not compilable(lean(relu).plan)
    assert int8 is None or not int8.plan.head.int8 or not compilable(int8.plan)


def test_without_a_compiler_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(AdaptiveError, match="needs a C\\+\\+ compiler"):
        Compilation([(lean(made("llama")), ((1, 1),))], tmp_path / "compiled")


@pytest.mark.skipif(shutil.which("false") is None, reason="there is no program that only fails")
def test_where_compiling_fails_the_eager_pass_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", shutil.which("false") or "")
    model = made("llama")
    forward = lean(model)
    compilation = Compilation([(forward, ((3, 3),))], tmp_path / "compiled")
    compilation.wait()
    assert compilation.problem is not None
    assert not list((tmp_path / "compiled").iterdir())
    same_logits(lean(model), forward, (3, 3))


@needs_compiler
def test_it_is_for_where_our_own_kernels_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({"compile": True, "home": tmp_path})
    if library() is not None:
        pair = load_pair(settings)
        assert pair.compilation is None
        assert "--compile changes nothing here" in " ".join(pair.warnings)
    monkeypatch.setattr(kernels, "NATIVE", tmp_path)
    library.cache_clear()
    try:
        pair = load_pair(settings)
        assert pair.compilation is not None
        pair.compilation.stop()
        assert pair.compilation.missing == len(OF_TARGET) + len(OF_DRAFT)
        assert "--compile" not in " ".join(pair.warnings)
        assert isinstance(pair.draft, TransformersEngine)
        assert pair.draft.weights.endswith("+compiled")
    finally:
        library.cache_clear()
