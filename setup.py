"""The part of the build that pyproject.toml cannot express: the compiled modules. These are the kernels, one module for
each instruction set, and the index of history drafting.

Without a C++ compiler, or one that supports the instructions, they are left out; the program then uses torch's
operations, and Python.
"""

import hashlib
import platform
import sys
from pathlib import Path
from typing import Any

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("adaptive/engines/cpu/native")
INDEX = Path("adaptive/drafting/native")
COMMON = "-std=c++17 -O3 -g0 -fvisibility=hidden"
AVX512BF16 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma"
X86 = {
    "amx": f"{AVX512BF16} -mamx-tile -mamx-bf16",
    "avx512bf16": AVX512BF16,
    "avx512vnni": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma",
    "avx2": "-mavx2 -mfma",
}
ARM = {"neondot": "-march=armv8.2-a+dotprod", "neon": ""}
FLAGS = ARM if platform.machine() in ("aarch64", "arm64") else X86
# For the compiler and the linker of a Mac, of a Python that was built for Intel's processors too and for systems that
# lack what these modules call: the first option takes the place of all of Python's own for processors.
MAC = ["-arch", platform.machine(), "-mmacosx-version-min=11.0"] if sys.platform == "darwin" else []


class Build(build_ext):
    """Compiles nanobind, but not the kernels, with ``-fno-strict-aliasing``: nanobind reads memory as other types than
    were written. The kernels do not, and the flag would cost a fifth to a third of a pass over several tokens (AVX2).
    """

    def build_extensions(self) -> None:
        """Compile all modules."""
        compile_file = self.compiler._compile

        def compile_rightly(
            target: str, source: str, ending: str, arguments: Any, flags: list[str], macros: Any
        ) -> None:
            more = ["-fno-strict-aliasing"] if source.endswith("nanobind.cpp") else []
            compile_file(target, source, ending, arguments, [*flags, *more], macros)

        self.compiler._compile = compile_rightly
        super().build_extensions()


def sources(folder: Path) -> list[Path]:
    """All compiled files, in the order in which they are hashed."""
    return sorted(file for file in folder.iterdir() if file.suffix in (".h", ".cpp", ".map"))


def fingerprint(folder: Path) -> str:
    """A hash of the sources, with which ``adaptive/compiled.py`` checks a module beside them when it is loaded."""
    digest = hashlib.sha256()
    for file in sources(folder):
        digest.update(file.name.encode() + b"\0" + file.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


def exports(name: str) -> list[str]:
    """Options of the linker with which a module exports only the name that Python needs. Apple's does not know a
    version script; other systems' may not."""
    if sys.platform == "darwin":
        return [f"-Wl,-exported_symbol,_PyInit_{name}"]
    return [f"-Wl,--version-script={FOLDER / 'exports.map'}"] if sys.platform == "linux" else []


def module(folder: Path, name: str, source: str, flags: str = "") -> Extension:
    """A module of the sources in ``folder``, with its own copy of nanobind that shares nothing with other modules."""
    beside = Path(nanobind.include_dir()).parent
    return Extension(
        f"{'.'.join(folder.parts)}.{name}",
        sources=[str(folder / source), str(folder / "nanobind.cpp")],
        depends=[str(file) for file in sources(folder)],
        include_dirs=[str(beside / part) for part in ("include", "src", "ext/robin_map/include")],
        define_macros=[("ADAPTIVE_SOURCES", f'"{fingerprint(folder)}"'), ("NB_DOMAIN", name), ("NDEBUG", None)],
        extra_compile_args=[*COMMON.split(), *MAC, *flags.split()],
        extra_link_args=[*MAC, *exports(name)],
        optional=True,
    )


if sys.platform == "win32":
    sys.exit("adaptive runs on Linux and macOS; on Windows install it in WSL, the Windows Subsystem for Linux")
kernels = [module(FOLDER, name, f"{name}.cpp", flags) for name, flags in FLAGS.items()]
setup(ext_modules=[*kernels, module(INDEX, "suffixes", "module.cpp")], cmdclass={"build_ext": Build})
