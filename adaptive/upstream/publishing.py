"""Puts a draft into another server: its options, the file that starts it, and the command that restarts it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from adaptive.errors import AdaptiveError, why_unread
from adaptive.printable import without_login
from adaptive.tls import trusted
from adaptive.upstream.kinds import ADAPTIVE, LLAMA_SERVER, LM_STUDIO, SGLANG, UNKNOWN, VLLM, Kind
from adaptive.upstream.starts import COMMENT, program_ends
from checkpoints import files

# Other names of the options that are written, and others that they replace (llama.cpp's ``common/arg.cpp``, vLLM's
# ``arg_utils.py``, SGLang's ``server_args.py``). Of an option that a command has twice, the last one counts.
OTHER_NAMES = {
    "--spec-draft-model": ("--model-draft", "-md", "--spec-draft-hf", "--hf-repo-draft", "-hfd", "-hfrd"),
    "--spec-draft-n-max": ("--draft", "--draft-n", "--draft-max"),
    "--spec-draft-n-min": ("--draft-min", "--draft-n-min"),
    "--speculative-config": ("-sc", "--spec-method", "--spec-model", "--spec-tokens"),
    "--speculative-algorithm": ("--speculative-algo",),
    "--speculative-draft-model-path": ("--speculative-draft-model", "--speculative-draft"),
}
# Regular expressions for a shell script: what is between an option and its value, the value, and what comes next. A
# value may have quoted and unquoted parts; only the first may go over several lines, and none is a command.
BETWEEN = r"(?:\s|\\\r?\n)+|="
PART = r"""'[^'\n]*'|"(?:[^"\\\n]|\\.)*"|\\[^\r\n]|[^\s\\'"`;&|<>()]"""
WORD = rf"""(?!-)(?:'[^']*'|"(?:[^"\\]|\\.)*"|{PART})(?:{PART})*"""
END = r"\s|\\\r?\n|[;&|<>)]|$"
# The file descriptor that the restart command's output goes to, because our standard output may be one JSON object.
STANDARD_ERROR = 2
# Seconds between two looks at whether a server is there again.
LOOK_S = 0.2


def takes_gguf(kind: Kind) -> bool:
    """Whether the server reads GGUF files, else folders of safetensors."""
    return kind in (LLAMA_SERVER, LM_STUDIO)


def check(kind: Kind, is_head: bool, by_hand: bool) -> None:
    """Raise AdaptiveError if there is nothing to write for such a server; ``by_hand``: the user gives it the draft."""
    if kind is UNKNOWN:
        raise AdaptiveError("what kind of server it is cannot be told; say it with --engine")
    if kind is LM_STUDIO and not by_hand:
        raise AdaptiveError("LM Studio is given a draft by hand; leave out --start and --restart")
    if kind is SGLANG and is_head:
        raise AdaptiveError(
            "SGLang does not run the heads that are grown here: it adds another input to the output of attention "
            "(norm_before_residual)"
        )


def options(kind: Kind, draft: Path, length: int, is_head: bool = False) -> dict[str, str]:
    """The server's options that use ``draft``, a model or an EAGLE-3 head, with this draft length. Raises AdaptiveError
    where it has none."""
    if kind is LLAMA_SERVER:
        by = "draft-eagle3" if is_head else "draft-simple"
        return {"--spec-type": by, "--spec-draft-model": str(draft), "--spec-draft-n-max": str(length)}
    if kind is VLLM:
        said = {"method": "eagle3" if is_head else "draft_model", "model": str(draft), "num_speculative_tokens": length}
        # Without spaces, so that it may be a part of a YAML value.
        return {"--speculative-config": json.dumps(said, separators=(",", ":"))}
    if kind is SGLANG:
        return {
            "--speculative-algorithm": "STANDALONE",
            "--speculative-draft-model-path": str(draft),
            "--speculative-num-steps": str(length),
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": str(length + 1),
        }
    if kind is ADAPTIVE:
        return {"--draft": str(draft), "--draft-length": str(length)}
    raise AdaptiveError(f"how {kind.name} is given a draft is not known; choose {draft} there by hand")


def edited(start: str, kind: Kind, wanted: dict[str, str]) -> str:
    """The start file ``start`` with these options in the place of their old values, under any name, or behind the
    program's name. Comments stay.

    Raises AdaptiveError if there is not exactly one command of the program to which options can be added, an old value
    cannot be told, or another option keeps the draft from being used.
    """
    missing = []
    if kind is LLAMA_SERVER:
        start = _with_minimum(start, int(wanted["--spec-draft-n-max"]))
    for name, value in wanted.items():
        start, count = _with_value(start, kind, name, shlex.quote(value))
        if not count:
            missing.append(f"{name} {shlex.quote(value)}")
    if not missing:
        return start
    ends = program_ends(start, kind)
    if len(ends) != 1:
        found = "more than one command" if ends else "no command"
        told = " ".join(f"{name} {shlex.quote(value)}" for name, value in wanted.items())
        raise AdaptiveError(
            f"the start file has {found} of {kind.name} to which options can be added; put {told} there by hand"
        )
    return f"{start[: ends[0]]} {' '.join(missing)}{start[ends[0] :]}"


def _with_value(start: str, kind: Kind, name: str, written: str) -> tuple[str, int]:
    """``start`` with ``written`` as the value of the option ``name``, and how often the option was there."""
    return _replaced(start, kind, name, f"put {name} {written} there by hand", lambda old: written)


def _with_minimum(start: str, length: int) -> str:
    """``start`` with the length of the shortest draft by the option's present name. Raises AdaptiveError if it is above
    ``length``: llama-server drops shorter drafts."""
    name = "--spec-draft-n-min"

    def checked(old: str) -> str:
        if not old.isdecimal() or int(old) > length:
            raise AdaptiveError(
                f"{name} {old} is in the start file, and the draft length is {length}: llama-server drops shorter "
                "drafts; take it out"
            )
        return old

    return _replaced(start, LLAMA_SERVER, name, "take it out", checked)[0]


def _replaced(start: str, kind: Kind, name: str, hint: str, write: Callable[[str], str]) -> tuple[str, int]:
    """``start`` with what ``write`` makes of the old value of the option ``name``, and how often the option was there.
    Raises AdaptiveError with the ``hint`` if it has a form that is not understood."""
    names = "|".join(map(_spelled, sorted((name, *OTHER_NAMES.get(name, ())), key=len, reverse=True)))
    option = rf"(?<![\w-])(?P<name>{names})(?![\w-])(?:(?P<between>{BETWEEN})(?P<value>{WORD})(?={END}))?"
    ends = program_ends(start, kind)
    found = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal found
        said, alone = match["name"], not start[: match.start()][-1:].strip()
        if said is None:
            return match[0]  # a comment
        if not said.startswith("--") and (not alone or (ends and match.start() < ends[0])):
            return match[0]  # short names may be another program's
        if match["value"] is None or not alone:
            raise AdaptiveError(f"{said} is in the start command in a form that is not understood; {hint}")
        found += 1
        return f"{name}{match['between']}{write(match['value'])}"

    return re.sub(rf"{COMMENT}|{option}", replace, start, flags=re.DOTALL), found


def _spelled(name: str) -> str:
    """A regular expression for an option's name, in which llama.cpp and vLLM take ``_`` for ``-``."""
    return re.escape(name) if not name.startswith("--") else "--" + re.escape(name[2:]).replace(r"\-", "[-_]")


@dataclass(frozen=True)
class StartFile:
    """The file that starts the server, and what stands in it. Raises AdaptiveError where it cannot be read."""

    path: Path
    before: str

    @classmethod
    def read(cls, path: Path) -> StartFile:
        """The file as it is."""
        try:
            return cls(path, _text(path))
        except (OSError, UnicodeDecodeError) as error:
            raise AdaptiveError(f"start file {path} cannot be read: {why_unread(error)}") from error

    @property
    def edited(self) -> bool:
        """Whether it does not contain its first text now."""
        try:
            return _text(self.path) != self.before
        except (OSError, UnicodeDecodeError):
            return True

    def write(self, text: str) -> None:
        """Replace the file's text, whole or not at all; its mode stays. Raises AdaptiveError."""
        try:
            real = self.path.resolve()
            mode = real.stat().st_mode
            files.replace_text(real.parent, real, text)
            real.chmod(mode)
        except OSError as error:
            raise AdaptiveError(f"start file {self.path} cannot be written ({error.strerror})") from error


def _text(path: Path) -> str:
    """A file's text, with its ends of lines as they are. Raises OSError and UnicodeDecodeError."""
    return path.read_bytes().decode("utf-8")


def restart(command: str, url: str, key: str | None, draft: Path | None, length: int, wait_s: float) -> None:
    """Run the user's ``command``, which finds ADAPTIVE_DRAFT and ADAPTIVE_DRAFT_LENGTH in its environment, and wait
    until the server answers. Both are empty without a ``draft``: an `adaptive serve` that the command starts takes them
    for settings, and would decode plainly with a length of 0. Raises AdaptiveError where either fails."""
    told = {"ADAPTIVE_DRAFT": "", "ADAPTIVE_DRAFT_LENGTH": ""}
    if draft is not None:
        told = {"ADAPTIVE_DRAFT": str(draft), "ADAPTIVE_DRAFT_LENGTH": str(length)}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            shell=True,
            env={**os.environ, **told},
            timeout=wait_s,
            stdin=subprocess.DEVNULL,
            stdout=STANDARD_ERROR,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AdaptiveError(f"the restart command did not end within {wait_s:.0f} s: {command}") from error
    if done.returncode != 0:
        raise AdaptiveError(f"the restart command ended with status {done.returncode}: {command}")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    while time.monotonic() - began < wait_s:
        try:
            there = httpx.get(f"{url}/v1/models", headers=headers, timeout=5, trust_env=False, verify=trusted())
            if there.status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(LOOK_S)
    raise AdaptiveError(f"the server at {without_login(url)} did not answer within {wait_s:.0f} s of its restart")
