"""Lists the lines that only a CUDA device reaches and no test on this machine runs, for docs/notes/2026-11-gpu.md.

    python scripts/gpu_only_lines.py               # runs the tests of TESTS, and prints the page's table
    python scripts/gpu_only_lines.py tests/x.py    # other tests

A line is listed if the tests did not run it and it depends on a condition on CUDA: it is in a branch for CUDA, after a
return without CUDA, or in a function that is called from such places only. Conditions are followed through names: a
variable whose value depends on CUDA makes a condition on it a condition on CUDA. Lines that were not run and depend on
no such condition are only counted; tests without CUDA could still reach them.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adaptive", "trainers", "cli")
# Tests that reach the code with conditions on CUDA; this script runs them on the CPU.
TESTS = (
    "test_queued_drafts", "test_cuda_graphs", "test_cuda_several", "test_budget", "test_doctor", "test_worker",
    "test_trainer", "test_quantised_checkpoints",
)  # fmt: skip


def asking_files() -> list[Path]:
    """The source files whose code has conditions on CUDA."""
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [path for path in found if Guards(path.read_text(encoding="utf-8")).lines]


def executable(source: str, name: str) -> set[int]:
    """The numbers of the lines that compile to code."""

    def of(code: CodeType) -> Iterator[int]:
        yield from (line for _, _, line in code.co_lines() if line)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from of(constant)

    return set(of(compile(source, name, "exec")))


class Guards:
    """Finds the ``lines`` of a source that depend on a condition on CUDA."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.names: set[str] = set()  # variables and attributes whose value depends on CUDA
        self.lines: set[int] = set()
        before = -1
        while len(self.names) + len(self.lines) != before:
            before = len(self.names) + len(self.lines)
            self._names()
            for node in ast.walk(self.tree):
                self._branches(node)
            self._functions()

    def asks(self, node: ast.AST | None) -> bool:
        """Whether an expression depends on the presence of CUDA."""
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("cuda"):
                return True
            if isinstance(part, ast.Attribute) and (part.attr in {"cuda", "CUDA_GRAPHS"} or part.attr in self.names):
                return True
            if isinstance(part, ast.Name) and part.id in self.names:
                return True
        return False

    def _names(self) -> None:
        for node in ast.walk(self.tree):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.IfExp) and self.asks(value.test):
                pass
            elif not (isinstance(value, ast.Compare) and self.asks(value)):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
            self.names |= {t.attr for t in targets if isinstance(t, ast.Attribute)}
            self.names |= {t.id for t in targets if isinstance(t, ast.Name)}
        for node in ast.walk(self.tree):  # a parameter that receives such an attribute depends on CUDA too
            if isinstance(node, ast.Call):
                self._passed(node)
        for node in ast.walk(self.tree):  # an attribute that is set on a line found so far exists only with CUDA
            inside = isinstance(node, ast.Assign) and node.lineno in self.lines
            for target in node.targets if inside else ():  # type: ignore[attr-defined]
                if isinstance(target, ast.Attribute):
                    self.names.add(target.attr)

    def _passed(self, call: ast.Call) -> None:
        given = [a.attr for a in call.args if isinstance(a, ast.Attribute) and a.attr in self.names]
        for name in given:
            self.names.add(name.lstrip("_"))

    def _branches(self, node: ast.AST) -> None:
        if isinstance(node, ast.For) and self.asks(node.iter):
            self._take(node.body)
        if isinstance(node, ast.If) and self.asks(node.test):
            without = _negative(node.test)
            self._take(node.orelse if without else node.body)
        blocks: list[object] = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
        for block in blocks:
            if not isinstance(block, list):  # an expression's body is an expression
                continue
            for place, one in enumerate(block):
                ends = isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return | ast.Raise | ast.Continue)
                if ends and self.asks(one.test) and _negative(one.test):
                    self._take(block[place + 1 :])

    def _functions(self) -> None:
        """Take the private functions that are called only from lines found so far."""
        defined = {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)}
        called: dict[str, set[int]] = defaultdict(set)
        choices = [n for n in ast.walk(self.tree) if isinstance(n, ast.IfExp) and self.asks(n.test)]
        chosen = {id(part) for choice in choices for part in ast.walk(choice.body)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and id(node) not in chosen:
                function = node.func
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                called[name].add(node.lineno)
        for name, node in defined.items():
            if name.startswith("_") and called[name] and called[name] <= self.lines:
                self._take(node.body)

    def _take(self, block: Iterable[ast.AST]) -> None:
        for node in block:
            self.lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]


def _negative(test: ast.expr) -> bool:
    """Whether a condition is true without CUDA: ``is None``, ``not``, ``!=``."""
    if isinstance(test, ast.BoolOp):
        return all(map(_negative, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return True
    if not isinstance(test, ast.Compare):
        return False
    none = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
    return isinstance(test.ops[0], ast.NotEq) or (isinstance(test.ops[0], ast.Is) and none)


class Seen:
    """Runs pytest and notes which lines of some files run, in all threads of this process."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.lines: dict[str, set[int]] = {str(path): set() for path in files}

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        found = self.lines.get(frame.f_code.co_filename)
        if found is None:
            return None
        found.add(frame.f_lineno)

        def line(frame: FrameType, event: str, argument: object) -> Any:
            found.add(frame.f_lineno)
            return line

        return line

    def run(self, arguments: list[str]) -> int:
        """Run pytest with these arguments. Returns its exit status."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            return int(pytest.main(arguments))
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]


def main() -> int:
    """Run the tests, print the table, return their exit status."""
    tests = sys.argv[1:] or [str(path) for name in TESTS if (path := ROOT / "tests" / f"{name}.py").exists()]
    files = asking_files()
    seen = Seen(files)
    status = seen.run(
        ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=-m 'not long and not thorough'", *tests]
    )
    print("\n| file | lines that only a CUDA device reaches | others that were not run |")
    print("|---|---|---|")
    for path in files:
        source = path.read_text(encoding="utf-8")
        missed = executable(source, str(path)) - seen.lines[str(path)]
        guarded = missed & Guards(source).lines
        text = source.splitlines()
        said = "<br>".join(f"{line}: `{text[line - 1].strip().replace('|', '&#124;')}`" for line in sorted(guarded))
        print(f"| `{path.relative_to(ROOT)}` | {said or 'none'} | {len(missed - guarded)} |")
    return status


if __name__ == "__main__":
    sys.exit(main())
