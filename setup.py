"""What pyproject.toml cannot say: the compiled kernels, one module for each instruction set.

They are left out where there is no C++ compiler, or it does not know the instructions; torch's operations are used
then.
"""

import hashlib
from pathlib import Path

import nanobind
from setuptools import Extension, setup

FOLDER = Path("adaptive/engines/cpu/native")
COMMON = "-std=c++17 -O3 -g0 -fvisibility=hidden -fno-strict-aliasing"
FLAGS = {
    "avx512bf16": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma",
    "avx512vnni": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma",
    "avx2": "-mavx2 -mfma",
}


def sources() -> list[Path]:
    """Everything that is compiled, in the order in which it is hashed."""
    return sorted(file for file in FOLDER.iterdir() if file.suffix in (".h", ".cpp", ".map"))


def fingerprint() -> str:
    """Of the sources; ``adaptive/engines/cpu/kernels.py`` compares it when it loads a module beside them."""
    digest = hashlib.sha256()
    for file in sources():
        digest.update(file.name.encode() + b"\0" + file.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


def module(name: str) -> Extension:
    """The kernels for one instruction set, with a copy of nanobind that shares nothing with the others'."""
    beside = Path(nanobind.include_dir()).parent
    return Extension(
        f"adaptive.engines.cpu.native.{name}",
        sources=[str(FOLDER / f"{name}.cpp"), str(FOLDER / "nanobind.cpp")],
        depends=[str(file) for file in sources()],
        include_dirs=[str(beside / part) for part in ("include", "src", "ext/robin_map/include")],
        define_macros=[("ADAPTIVE_SOURCES", f'"{fingerprint()}"'), ("NB_DOMAIN", name), ("NDEBUG", None)],
        extra_compile_args=[*COMMON.split(), *FLAGS[name].split()],
        extra_link_args=[f"-Wl,--version-script={FOLDER / 'exports.map'}"],  # nothing but what Python looks for
        optional=True,
    )


setup(ext_modules=[module(name) for name in FLAGS])
