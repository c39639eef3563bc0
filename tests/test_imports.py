"""No file and no package imports itself through others, function-level imports included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adaptive", "checkpoints", "cli", "trainers")
Graph = dict[str, set[str]]


def import_graph(root: Path, packages: tuple[str, ...]) -> Graph:
    """For each module of ``packages``, the modules of these packages that its file imports anywhere, also for types
    only."""
    files = {_module(file, root): file for package in packages for file in (root / package).rglob("*.py")}
    return {name: set(_imported(file, files)) - {name} for name, file in files.items()}


def _module(file: Path, root: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{file} imports relatively"
            # An imported name may be a module of the package or defined in the package's own file.
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in inside]
        else:
            continue
        yield from (name for name in names if name in known)


def circle(graph: Graph) -> list[str]:
    """One cycle of the graph, with its first member repeated at the end; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            found = visit(other, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def between_children(graph: Graph, package: str) -> Graph:
    """Imports between the direct children of ``package`` ("" for the top level), each including everything inside
    it."""
    depth = len(package.split(".")) if package else 0
    inside = [name for name in graph if not package or name.startswith(f"{package}.")]
    children: Graph = {".".join(name.split(".")[: depth + 1]): set() for name in inside}
    for name in inside:
        child = ".".join(name.split(".")[: depth + 1])
        others = {".".join(other.split(".")[: depth + 1]) for other in graph[name]}
        children[child] |= (others & children.keys()) - {child}
    return children


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(ROOT, PACKAGES)


def test_no_file_imports_itself_by_way_of_others(graph: Graph) -> None:
    assert len(graph) > 100
    assert circle(graph) == []


def test_no_package_imports_itself_by_way_of_others(graph: Graph) -> None:
    packages = {""} | {name.rpartition(".")[0] for name in graph}
    assert {"adaptive", "adaptive.engines", "adaptive.engines.cpu"} <= packages
    for package in sorted(packages):
        assert circle(between_children(graph, package)) == []


def test_a_circle_is_seen_also_where_functions_and_types_close_it(tmp_path: Path) -> None:
    package = tmp_path / "made"
    for folder in (package, package / "one", package / "two"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (package / "one" / "a.py").write_text("from made.two import b\n")
    (package / "two" / "b.py").write_text("x = 1\n")
    (package / "two" / "c.py").write_text("y = 1\n")
    found = import_graph(tmp_path, ("made",))
    assert circle(found) == []
    assert circle(between_children(found, "made")) == []
    # With this import the packages import each other, though no file is in a cycle.
    (package / "two" / "c.py").write_text("def f():\n    import made.one.a\n")
    found = import_graph(tmp_path, ("made",))
    assert circle(found) == []
    assert circle(between_children(found, "made")) == ["made.one", "made.two", "made.one"]
    (package / "two" / "b.py").write_text("if TYPE_CHECKING:\n    from made.one.a import A\n")
    assert circle(import_graph(tmp_path, ("made",))) == ["made.one.a", "made.two.b", "made.one.a"]
