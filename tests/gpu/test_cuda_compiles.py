"""The kernels compile for every generation of GPUs that they are used on, which needs Triton but no GPU."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton"
    ),
    pytest.mark.thorough,
]

# Compute capabilities, and the bytes of shared memory that one program may use: T4, A100, RTX 30, RTX 40, H100, RTX 50.
GPUS = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}
INTEGERS = {"count", "inputs", "outputs", "width", "heads", "key_heads", "group", "rows", "texts", "blocks"}
# Arguments that need not be multiples of 16.
UNKNOWN = {"count", "texts", "blocks", "eps", "scale", "group"}
CONSTANTS: dict[str, list[dict[str, Any]]] = {
    "_vector": [{"BIAS": True, "ROWS": 4, "STEP": 1024}, {"BIAS": False, "ROWS": 2, "STEP": 1024}],
    "_add_norm": [{"ADDS": True, "BLOCK": 4096}, {"ADDS": False, "BLOCK": 8192}],
    "_rotate_and_store": [{"NORMS": True, "SIZE": 128}, {"NORMS": False, "SIZE": 64}],
    "_attend": [
        {"WINDOW": 0, "SIZE": 64, "PARTS": 32},
        {"WINDOW": 0, "SIZE": 128, "PARTS": 32},
        {"WINDOW": 4096, "SIZE": 256, "PARTS": 8},
    ],
    "_join": [{"SIZE": 128, "PARTS": 32}],
    "_gate": [{"BLOCK": 1024}],
    "_int8": [
        {"BIAS": False, "COUNT": 16, "ROWS": 32, "STEP": 256},
        {"BIAS": True, "COUNT": 32, "ROWS": 32, "STEP": 256},
    ],
    "_nf4": [
        {"BIAS": False, "COUNT": 1, "ROWS": 8, "STEP": 32, "EVEN": True},
        {"BIAS": True, "COUNT": 5, "ROWS": 8, "STEP": 128, "EVEN": True},
        {"BIAS": False, "COUNT": 17, "ROWS": 4, "STEP": 128, "EVEN": False},
    ],
}  # fmt: skip


def compiled(name: str, constants: dict[str, Any], dtype: str, capability: int) -> Any:
    """The kernel of this name for numbers of ``dtype``, compiled for GPUs of a capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from adaptive.engines.cuda import kernels, nf4

    kernel = getattr(nf4 if name == "_nf4" else kernels, name)
    if name == "_attend":
        rows, block = kernels.tiles(1000, constants["SIZE"] * (4 if dtype == "fp32" else 2))
        constants = constants | {"ROWS": rows, "BLOCK": block}
    types = {
        "start": "*i64",
        "table": "*i64",
        "eps": "fp32",
        "scale": "fp32",
        "sums": "*fp32",
        "scores": "*fp32",
        "code": "*fp32",
    }
    types |= dict.fromkeys(INTEGERS, "i32")
    if name == "_nf4":
        types |= {"x": "*i32", "weight": "*i32", "scales": "*fp32"}
    if name == "_int8":
        types |= {"weight": "*i8", "scales": "*fp32"}
    names = kernel.arg_names
    signature = {one: "constexpr" if one in constants else types.get(one, f"*{dtype}") for one in names}
    aligned = [one for one in names if one not in constants and one not in UNKNOWN]
    if name == "_nf4":
        aligned.remove("weight")  # which it does not want to know
    source = ASTSource(
        kernel, signature, constexprs={(names.index(one),): value for one, value in constants.items()},
        attrs={(names.index(one),): [["tt.divisibility", 16]] for one in aligned},
    )  # fmt: skip
    warps = {"_rotate_and_store": 1, "_join": 1, "_nf4": max(1, constants.get("STEP", 32) // 32)}.get(name, 4)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("name", "constants"), [(name, one) for name, some in CONSTANTS.items() for one in some])
def test_a_kernel_compiles_and_fits(name: str, constants: dict[str, Any], capability: int) -> None:
    dtypes = ["fp16"] if capability < 80 else ["fp16", "bf16"]
    for dtype in dtypes if name in ("_nf4", "_int8") else [*dtypes, "fp32"]:
        assert compiled(name, constants, dtype, capability).metadata.shared <= GPUS[capability]
