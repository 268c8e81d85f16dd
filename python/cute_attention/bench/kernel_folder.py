"""Kernels of rows in a folder: built into it on one machine, loaded from it on another."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import BuildError
from ..native import core, kernel_cache
from ..native.core import Kernel
from ..rows.libraries import load_library
from ..rows.row import Row

_PREFIX = kernel_cache.PLUG_IN


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
    return load_file(found[0])


def load_file(library: Path) -> Kernel:
    """The kernel of a library that `build` has put into a folder, also where it is loaded already,
    as a plug-in.

    Raises:
        BuildError: it cannot be loaded.
    """
    name = library.stem.removeprefix(_PREFIX)
    if name not in {kernel.name for kernel in core.kernels()}:
        load_library(library, on_request=True)
    return next(kernel for kernel in core.kernels() if kernel.name == name)
