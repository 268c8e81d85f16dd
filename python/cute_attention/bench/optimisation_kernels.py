"""The kernels of `bench steps`: built into a folder on one machine, loaded from it on another."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ..errors import BuildError
from ..native import core, kernel_cache, toolchain
from ..native.core import Kernel
from ..rows.libraries import load_library
from ..rows.row import Row

FIGURES = "figures.json"  # in the folder: what is known of its kernels without a GPU
_PREFIX = kernel_cache.PLUG_IN
_RESOURCES = re.compile(r"\b([A-Z]+):(\d+)")

Figures = dict[str, float]


def libraries_of(row: Row, folder: Path) -> list[Path]:
    """The libraries of a row in a folder; the names of several end in other hashes."""
    name = re.compile(rf"{_PREFIX}{row.name}_[0-9a-f]{{8}}\.so")
    return sorted(path for path in folder.glob(f"{_PREFIX}*.so") if name.fullmatch(path.name))


def build(row: Row, folder: Path, chips: Iterable[int] | None) -> Path:
    """Builds a row, and puts its library into a folder in place of older ones of the row."""
    kernel = row.build(chips=chips)
    path = kernel_cache.copy_of(kernel.name, folder)
    for older in libraries_of(row, folder):
        if older != path:
            older.unlink()
    return path


def load(row: Row, folder: Path) -> Kernel:
    """The kernel of a row whose library is in a folder.

    Raises:
        BuildError: the folder has none, or several, or it cannot be loaded.
    """
    found = libraries_of(row, folder)
    if len(found) != 1:
        raise BuildError(f"{folder} has {len(found)} libraries of {row.name}, expected 1")
    name = found[0].stem.removeprefix(_PREFIX)
    if name not in {kernel.name for kernel in core.kernels()}:
        load_library(found[0], on_request=True)
    return next(kernel for kernel in core.kernels() if kernel.name == name)


def machine_code(library: Path) -> Figures:
    """What ptxas gave a thread of a library's kernel: its registers, and the bytes that it spills.
    Nothing where the toolkit's cuobjdump is not found."""
    program = toolchain.program("cuobjdump")
    if program is None:
        return {}
    command = [program, "--dump-resource-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: Figures = {}
    for line in done.stdout.splitlines():
        used = {name: float(number) for name, number in _RESOURCES.findall(line)}
        if "REG" in used:
            found["registers"] = max(used["REG"], found.get("registers", 0.0))
            spilled = used.get("STACK", 0.0) + used.get("LOCAL", 0.0)
            found["spilled_bytes"] = max(spilled, found.get("spilled_bytes", 0.0))
    return found


def read_figures(folder: Path) -> dict[str, Figures]:
    """What is kept in a folder about its kernels, by the names of their rows."""
    file = folder / FIGURES
    return json.loads(file.read_text()) if file.is_file() else {}


def write_figures(folder: Path, figures: dict[str, Figures]) -> None:
    (folder / FIGURES).write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
