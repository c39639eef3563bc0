"""What pyproject.toml cannot say: what is compiled. The kernels, one module for each instruction set, and the index of
history drafting.

They are left out where there is no C++ compiler, or it does not know the instructions; torch's operations, and Python,
are used then.
"""

import hashlib
from pathlib import Path
from typing import Any

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("adaptive/engines/cpu/native")
INDEX = Path("adaptive/drafting/native")
COMMON = "-std=c++17 -O3 -g0 -fvisibility=hidden"
AVX512BF16 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma"
FLAGS = {
    "amx": f"{AVX512BF16} -mamx-tile -mamx-bf16",
    "avx512bf16": AVX512BF16,
    "avx512vnni": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma",
    "avx2": "-mavx2 -mfma",
}


class Build(build_ext):
    """nanobind reads memory as other types than were written, and is compiled so that this is right. The kernels do
    not, and the flag would cost them a fifth to a third of a pass over several tokens (AVX2)."""

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
    """Everything that is compiled, in the order in which it is hashed."""
    return sorted(file for file in folder.iterdir() if file.suffix in (".h", ".cpp", ".map"))


def fingerprint(folder: Path) -> str:
    """Of the sources; ``adaptive/compiled.py`` compares it when it loads a module beside them."""
    digest = hashlib.sha256()
    for file in sources(folder):
        digest.update(file.name.encode() + b"\0" + file.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


def module(folder: Path, name: str, source: str, flags: str = "") -> Extension:
    """A module of what is in ``folder``, with a copy of nanobind that shares nothing with the others'."""
    beside = Path(nanobind.include_dir()).parent
    return Extension(
        f"{'.'.join(folder.parts)}.{name}",
        sources=[str(folder / source), str(folder / "nanobind.cpp")],
        depends=[str(file) for file in sources(folder)],
        include_dirs=[str(beside / part) for part in ("include", "src", "ext/robin_map/include")],
        define_macros=[("ADAPTIVE_SOURCES", f'"{fingerprint(folder)}"'), ("NB_DOMAIN", name), ("NDEBUG", None)],
        extra_compile_args=[*COMMON.split(), *flags.split()],
        extra_link_args=[f"-Wl,--version-script={FOLDER / 'exports.map'}"],  # nothing but what Python looks for
        optional=True,
    )


kernels = [module(FOLDER, name, f"{name}.cpp", flags) for name, flags in FLAGS.items()]
setup(ext_modules=[*kernels, module(INDEX, "suffixes", "module.cpp")], cmdclass={"build_ext": Build})
