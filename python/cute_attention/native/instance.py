"""How a row is compiled: its source files and the options of nvcc, from the templates and the list
of flags that CMake uses too (src/kernels)."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import BuildError
from . import study
from .rows import TableRow

_PACKAGE = __name__.partition(".")[0]
# What CMake adds by itself for a shared library in C++17 (CMakeLists.txt).
_LIBRARY = ("-std=c++17", "-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden")
LINK = (
    "-shared",
    *(f"-Xlinker={word}" for word in ("--exclude-libs", "ALL", "--no-undefined")),
)
# Below src/: what a library is compiled from, beside the headers of include/.
SOURCES = (
    "append_tokens.cu",
    "append_tokens.h",
    "call_counters.cu",
    "combine_splits.cu",
    "device.cu",
    "device.h",
    "kernels/instance.cu.in",
    "kernels/nvcc.flags",
    "kernels/row.h",
    "kernels/table.cpp.in",
)


def sources() -> Path:
    """The folder with include/ and src/: the checkout that this file is of, else the package.

    Raises:
        BuildError: neither has them.
    """
    folders = [Path(__file__).resolve().parents[3]]
    folders += [Path(folder) for folder in sys.modules[_PACKAGE].__path__]
    for folder in folders:
        if (folder / "src" / SOURCES[0]).is_file() and (folder / "include" / _PACKAGE).is_dir():
            return folder
    raise BuildError(
        "the C++ headers and sources of the kernels, include/ and src/, are neither in a checkout "
        f"around {Path(__file__).parents[1]} nor installed with the package: install "
        "cute-attention anew (pip install --force-reinstall cute-attention)"
    )


@functools.cache
def flags() -> dict[str, tuple[str, ...]]:
    """What nvcc.flags says, by name."""
    lines = (sources() / "src" / "kernels" / "nvcc.flags").read_text().splitlines()
    words = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: tuple(rest) for name, *rest in words}


def targets(arch: str, direction: str, chips: Iterable[int]) -> tuple[str, ...]:
    """nvcc's targets for a family: `cute_attention_read_archs` of cmake/architectures.cmake.

    Args:
        arch: "sm80" or "sm90".
        direction: "forward" or "backward".
        chips: compute capabilities (major * 10 + minor) that an sm80 library has machine code for.
    """
    if arch == "sm90":
        return ("-gencode=arch=compute_90a,code=sm_90a",)
    chips = list(chips)
    older = [chip for chip in chips if chip < 90]
    newer = [chip for chip in chips if chip >= 90]
    if not older:
        return (_target(90, ["compute_90"], newer),)
    if direction == "forward":
        return (_target(80, ["compute_80"], older + newer),)
    return (_target(80, ["compute_80"], older), *([_target(90, [], newer)] if newer else []))


def _target(ptx: int, kept: list[str], chips: Iterable[int]) -> str:
    code = kept + [f"sm_{chip}" for chip in chips]
    return f"-gencode=arch=compute_{ptx},code=[{','.join(code)}]"


def options(row: TableRow) -> tuple[str, ...]:
    """The options of a row: `cute_attention_instance_options` of cmake/rows.cmake."""
    found: tuple[str, ...] = ()
    if row.ptxas != "O3":
        found += (f"-Xptxas=-{row.ptxas}",)
    if row.arch == "sm90" and not {str(n) for n in _wgmma(row)} <= {*flags()["wgmma"]}:
        found += flags()["other_wgmma"]
    return found


def _wgmma(row: TableRow) -> tuple[int, ...]:
    """The N of all WGMMAs of an sm90 row: `cute_attention_row_wgmma` of cmake/rows.cmake."""
    columns = (row.tile_n, row.head_dim_v)
    if row.direction == "forward":
        return columns
    parts = max(1, (row.warps // 4 - 1) * 64 // row.tile_m)
    return (*columns, row.tile_m, row.head_dim, row.head_dim // parts)


def compile_flags(row: TableRow, chips: Iterable[int]) -> tuple[str, ...]:
    """All options of nvcc for a row's kernels but paths."""
    kernels = flags()["kernels"]
    if row.study.fast_math == "off":
        kernels = tuple(flag for flag in kernels if flag != "--use_fast_math")
    return (*_LIBRARY, *kernels, *targets(row.arch, row.direction, chips), *options(row))


def launch_header(row: TableRow) -> str:
    """The header with the class that launches the row's kernels."""
    return f"{_PACKAGE}/{row.arch}/{row.direction}_launch.h"


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = (sources() / "src" / "kernels" / template).read_text()
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def instance_text(row: TableRow, launch: str) -> str:
    """The source file with a row's kernels; `launch` is the header of their launch class."""
    launcher = f"{row.arch}::{row.direction.capitalize()}Launch"
    return _filled(
        "instance.cu.in",
        {
            "launch": launch,
            "lines": dataclasses.replace(row, study=study.TABLES).line(),
            "study": study.specialisation(row.study, f"rows::{row.name}"),
            "launchers": f"CUTE_ATTENTION_LAUNCHER({row.name}, {launcher})",
        },
    )


def table_text(row: TableRow, build: str) -> str:
    """The source file with the table of a library of one row; `build` says how it was built."""
    return _filled(
        "table.cpp.in",
        {
            "declarations": f"KernelRow row_{row.name}();\n",
            "rows": f"      rows::row_{row.name}(),\n",
            "name": row.arch,
            "build": build,
        },
    )
