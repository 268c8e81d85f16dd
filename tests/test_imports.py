"""Imports between the package's modules go downward only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cute_attention

PACKAGE = "cute_attention"
FOLDER = Path(cute_attention.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
# What the package's own __init__ re-exports is used by the tools as users use it.
TOOLS = ("bench", "layouts", "tune", "cli")


def module_name(file: Path) -> str:
    parts = file.relative_to(FOLDER).with_suffix("").parts
    return ".".join((PACKAGE, *(part for part in parts if part != "__init__")))


MODULES = {module_name(file): file for file in FILES}


def imported(name: str, file: Path) -> Iterator[str]:
    """The package's modules that a file imports: at its top, in functions, or for types alone.

    None is exempt, for none needs to be: the packages that are optional and imported late
    (matplotlib, rich, tensor_layouts) are not ours, and so are no part of a circle.
    """
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(parents) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            assert base in MODULES or not f"{base}.".startswith(f"{PACKAGE}."), (name, base)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            while target and target not in MODULES:
                target = target.rpartition(".")[0]
            if target and target != name:
                yield target


IMPORTS = {name: set(imported(name, file)) for name, file in MODULES.items()}


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_the_parser_sees_imports() -> None:
    assert f"{PACKAGE}.api" in IMPORTS[PACKAGE]
    assert f"{PACKAGE}.native.core" in IMPORTS[f"{PACKAGE}.native.binding"]
    assert f"{PACKAGE}.problem" in IMPORTS[f"{PACKAGE}.native.core"]
    assert sum(map(len, IMPORTS.values())) > len(MODULES)


def test_no_circle_of_modules() -> None:
    tools = tuple(f"{PACKAGE}.{tool}" for tool in (*TOOLS, "__main__"))
    # The tools import the package itself, which imports none of them.
    assert not [name for name in IMPORTS[PACKAGE] if name.startswith(tools)]
    for name, targets in IMPORTS.items():
        assert name.startswith(tools) or PACKAGE not in targets, name
    assert_no_circle(IMPORTS)


def test_no_circle_of_rooms() -> None:
    """There is no circle between folders either, where each folder counts as one module. Files
    named __main__ are left out: `python -m` runs them, and nothing imports them."""
    rooms: dict[str, set[str]] = {}
    for name, targets in IMPORTS.items():
        if name.endswith(".__main__"):
            assert not any(name in others for others in IMPORTS.values())
            continue
        room = ".".join(name.split(".")[:2])
        others = {".".join(target.split(".")[:2]) for target in targets}
        rooms.setdefault(room, set()).update(others - {room})
    assert_no_circle(rooms)


def test_the_core_imports_no_torch() -> None:
    for name in ("problem", "native.core", "native.rows"):
        tree = ast.parse(MODULES[f"{PACKAGE}.{name}"].read_text())
        names = {
            alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names
        }
        assert "torch" not in names
