"""Runs Python without what only Linux has, as on a Mac: ``python as_on_macos.py [-I] (-m MODULE | FILE) ARGUMENTS``.

What this process is told of its system is what macOS would tell: the names of the system and of the processor, no
``/proc``, no affinity, no large pages, none of glibc's own calls, 256 open files. Processes that it starts with
``sys.executable`` are told the same. torch, psutil and what asks the hub are imported before, because they contain code
for the system that they were built for. The rest is Linux all the same: its kernel, its C library, its file systems.

``KERNELS=avx2`` in the environment has that library loaded in place of the one for ARM. Without it there is none, as
without a compiler.
"""

from __future__ import annotations

import atexit
import builtins
import collections
import ctypes
import errno
import importlib.abc
import io
import mmap
import os
import platform
import resource
import runpy
import select
import shlex
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub.hf_api  # noqa: F401 - whose own libraries call those of the system
import psutil
import torch

# Names of modules of the standard library that Linux has and macOS has not.
MISSING = {
    os: (
        "sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_setscheduler", "sched_getparam",
        "posix_fadvise", "posix_fallocate", "memfd_create", "pipe2", "eventfd", "eventfd_read", "eventfd_write",
        "copy_file_range", "splice", "getrandom", "O_DIRECT", "O_TMPFILE", "O_PATH", "O_NOATIME", "pidfd_open",
        "unshare", "setns", "getxattr", "setxattr", "getresuid", "setresuid",
    ),
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK", "MADV_REMOVE", "MAP_POPULATE", "MAP_DENYWRITE"),
    resource: ("RUSAGE_THREAD", "prlimit", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO"),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "SIGPOLL", "sigwaitinfo", "sigtimedwait"),
    socket: (
        "SO_PEERCRED", "SO_BINDTODEVICE", "SO_DOMAIN", "SO_PROTOCOL", "TCP_QUICKACK", "TCP_USER_TIMEOUT", "TCP_CORK",
        "TCP_DEFER_ACCEPT", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "MSG_NOSIGNAL", "MSG_CMSG_CLOEXEC",
    ),
}  # fmt: skip
# Calls of the C library that only Linux's have.
GLIBC = ("mallopt", "malloc_trim", "prctl", "sched_getaffinity", "gettid", "syscall")
# Packages that are not installed on a Mac.
PACKAGES = ("bitsandbytes", "triton", "nvidia")
# Folders that macOS does not have, and modules that were made for Linux and read them.
FOLDERS, READERS = ("/proc/", "/sys/"), ("psutil", "torch")
OPEN_FILES = 256


def become_macos() -> None:
    """Take away from this process what only Linux has."""
    for module, names in MISSING.items():
        for name in names:
            vars(module).pop(name, None)
    _hide_folders()
    _hide_calls()
    sys.meta_path.insert(0, _NotThere())
    torch.backends.mkldnn.is_available = lambda: False
    torch.backends.mps.is_available = lambda: True  # what is computed there by mistake fails
    torch.backends.quantized.engine = "qnnpack"
    times = collections.namedtuple("scputimes", ("user", "nice", "system", "idle"))
    on_linux = psutil.cpu_times
    psutil.cpu_times = lambda percpu=False: (
        [times(*one[:4]) for one in on_linux(True)] if percpu else times(*on_linux()[:4])
    )
    for name in ("cpu_affinity", "io_counters", "memory_maps", "rlimit", "ionice"):
        delattr(psutil.Process, name)
    sysconfig.get_config_vars()  # kept from now on: there are none for another system
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, limit[1]))
    sys.platform = "darwin"
    name = os.uname()
    platform.mac_ver = lambda: ("15.6", ("", "", ""), "arm64")
    platform.system, platform.machine, platform.processor = lambda: "Darwin", lambda: "arm64", lambda: "arm"
    os.uname = lambda: os.uname_result(("Darwin", name.nodename, "24.6.0", "Darwin Kernel Version 24.6.0", "arm64"))
    sys.executable = _executable()


def _hide_folders() -> None:
    def hidden(path: Any) -> bool:
        name = "" if isinstance(path, int) else os.fsdecode(path)
        return name.startswith(FOLDERS) and not _asked_by_readers()

    def without(call: Any) -> Any:
        def instead(path: Any = ".", *given: Any, **named: Any) -> Any:
            if hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
            return call(path, *given, **named)

        return instead

    builtins.open = io.open = without(io.open)
    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"):
        setattr(os, name, without(getattr(os, name)))


def _asked_by_readers() -> bool:
    """Whether a library that was made for Linux reads there."""
    frame = sys._getframe(3)
    callers = []
    while frame is not None and len(callers) < 4:
        callers.append(str(frame.f_globals.get("__name__")).partition(".")[0])
        frame = frame.f_back
    return any(name in READERS for name in callers)


def _hide_calls() -> None:
    class Library(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            if self._name is None and name in GLIBC:
                raise AttributeError(f"dlsym({name}): symbol not found")
            return super().__getattr__(name)

    ctypes.CDLL = Library


class _NotThere(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _executable() -> str:
    """A program that runs Python like this one; processes that are started with it use it too."""
    if known := os.environ.get("AS_ON_MACOS"):
        return known
    folder = tempfile.mkdtemp(prefix="as-on-macos-")
    atexit.register(shutil.rmtree, folder, True)
    script = Path(folder) / "python3"
    words = shlex.join([sys.executable, str(Path(__file__).resolve())])
    script.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    os.environ["AS_ON_MACOS"] = str(script)
    return str(script)


def _load_instead(library: str) -> None:
    """Have this library loaded in place of those for ARM."""
    from adaptive.engines.cpu import kernels

    kernels.ARM.clear()
    kernels.ARM[library] = set()


def main() -> None:
    """Run what the command line names."""
    del sys.argv[0]
    if sys.argv[0] == "-I":
        del sys.argv[0]
    if sys.argv[0] == "-m":
        sys.path.insert(0, os.getcwd())
        del sys.argv[0]
    become_macos()
    if library := os.environ.get("KERNELS"):
        _load_instead(library)
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
