"""A row of a kernel table, written in Python."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import type_name
from ..errors import BuildError
from ..native import build, core, rows, study, toolchain
from ..native.build import Source
from ..native.core import Kernel
from ..native.refusals import refusal
from ..native.rows import TableRow
from ..native.study import Study
from . import proofs

if TYPE_CHECKING:
    from ..layouts.checks import Report

_CHOICES = {
    "arch": ("sm80", "sm90"),
    "direction": ("forward", "backward"),
    "dtype": ("fp16", "bf16"),
    "ptxas": ("O0", "O1", "O2", "O3"),
}
_NUMBERS = ("head_dim", "head_dim_v", "tile_m", "tile_n", "stages", "warps")
_STUDY = tuple(field.name for field in dataclasses.fields(Study))
_MOST_WARPS = 32  # of a CTA
_HEAD_DIMS = 8  # their multiple: what a thread loads at a time


class Row:
    """A kernel that one would like to have: what it computes and how, in the columns of the tables
    (src/kernels/*.def).

    What is left out is taken from the nearest row of the tables, that of `nearest`: of the same
    architecture and direction, if possible with the same score modifiers, and with the smallest
    head dims that serve those of this row.

    Args:
        arch: "sm80" for Ampere and all newer GPUs, "sm90" for Hopper.
        direction: "forward" or "backward".
        dtype: "fp16" or "bf16", of q, k, v and the output.
        head_dim: the largest that the kernel serves, a multiple of 8.
        head_dim_v: the same of v and the output; head_dim where it is left out.
        score_mods: what the kernel does to scores: "softcap", "alibi", "bias", "dropout", "qv" or
            several of them. It serves only calls that ask for all of these and for no other; with
            all but "qv", calls that ask for any of them.
        tile_m: queries of a tile; backward, of a step.
        tile_n: keys of a tile; backward, of a CTA.
        stages: buffers of K and V in shared memory; backward, of Q and dO.
        warps: of a CTA, producers included.
        ptxas: the level at which ptxas optimises, "O0" to "O3".
        **columns: columns for study, which no row of the tables has: copies, loads, swizzle,
            fragments_ahead, softmax, probabilities, turns, grid, grad_q, grad_q_sums, key_stages,
            fast_math. docs/rows.md says what they mean, and which kernels have them. `swizzle` may
            also be True, 128 bytes, or False, none.

    Raises:
        TypeError: a column of the wrong type, or no such column.
        ValueError: a value or a combination that no kernel can have.

    Example:
        >>> from cute_attention import rows
        >>> row = rows.Row("sm80", "forward", "bf16", head_dim=128, tile_n=32)
        >>> row.name, row.nearest
        ('sm80_fwd_bf16_d128_m128n32s1w4_o1', 'sm80_fwd_bf16_d128')
    """

    def __init__(
        self,
        arch: str,
        direction: str,
        dtype: str,
        *,
        head_dim: int,
        head_dim_v: int | None = None,
        score_mods: str | Iterable[str] = (),
        tile_m: int | None = None,
        tile_n: int | None = None,
        stages: int | None = None,
        warps: int | None = None,
        ptxas: str | None = None,
        **columns: str | int,
    ) -> None:
        given: dict[str, Any] = {
            "arch": arch,
            "direction": direction,
            "dtype": dtype,
            "head_dim": head_dim,
            "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
            "score_mods": _modifiers(score_mods),
        }
        how = {"tile_m": tile_m, "tile_n": tile_n, "stages": stages, "warps": warps, "ptxas": ptxas}
        given |= {name: value for name, value in how.items() if value is not None}
        for name, value in given.items():
            _check_column(name, value)
        near = _nearest(given)
        made = dataclasses.replace(near, **given, study=_study(columns))
        if refused := refusal(made):
            raise ValueError(f"Row: {refused}")
        self.nearest: str = near.name
        self.columns: TableRow = dataclasses.replace(made, name=_name_of(made))

    @classmethod
    def of(cls, name: str, **changes: Any) -> Row:
        """The row of the tables with this name, with other values in some columns.

        Args:
            name: of a row in src/kernels/*.def.
            **changes: columns and their values, as `Row` takes them.

        Raises:
            TypeError: as `Row` does.
            ValueError: no such row or column, or as `Row` does.

        Example:
            >>> from cute_attention import rows
            >>> rows.Row.of("sm90_fwd_bf16_d64", stages=2).columns.tile_m
            192
        """
        row = next((row for row in rows.table() if row.name == name), None)
        if row is None:
            raise ValueError(f"Row.of: name is {name!r}, expected a row of src/kernels/*.def")
        values = _values(row)
        if unknown := sorted(changes.keys() - values):
            raise ValueError(f"Row.of: no column is called {unknown[0]!r}, they are {[*values]}")
        return cls(**{**values, **changes})

    @property
    def name(self) -> str:
        """What it computes and how, in one word; that of a kernel that was built goes on with a
        hash of its source."""
        return self.columns.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(self.columns)

    def __repr__(self) -> str:
        values = _values(self.columns)
        usual = dataclasses.asdict(study.TABLES)
        shown = [f"{name}={value!r}" for name, value in values.items() if usual.get(name) != value]
        return f"Row({', '.join(shown)})"

    def check(self, include: str | os.PathLike[str] | None = None) -> list[Report]:
        """Prove the layouts of the row's kernels, as `python -m cute_attention layouts check` does.
        This takes seconds, a C++ compiler, and no GPU; docs/layouts.md explains the rules.

        Args:
            include: a folder of headers that are found before the package's own.

        Returns:
            A report for each kernel of the row, with all results.

        Raises:
            RowError: a proof does not hold, or the kernels' own assertions refuse the row.
            BuildError: the layout lab lacks something; the message says how to get it.
        """
        return proofs.check(self.columns, _path("check", "include", include))

    def build(
        self,
        include: str | os.PathLike[str] | None = None,
        source: str | os.PathLike[str] | None = None,
        chips: Iterable[int] | None = None,
    ) -> Kernel:
        """Compile the row with nvcc and load it. The kernel serves only calls that ask for it.

        What was compiled is kept in a cache folder, of which docs/rows.md tells more. Nothing is
        proven: `check` does that.

        Args:
            include: a folder of headers that are found before the package's own, such as a copy of
                some of them with a layout changed.
            source: a file in place of cute_attention/<arch>/<direction>_launch.h, which must define
                the class of that header. Headers of its own belong into `include`.
            chips: the compute capabilities, such as 80 or 90, that an sm80 row gets machine code
                for; those of this machine's GPUs where it is left out, 80 where there is none.

        Returns:
            The kernel, for the argument `kernel` of `attention` and for `rows.use`.

        Raises:
            BuildError: nvcc or headers are missing, the compiler refuses the row, or the cache
                cannot be used.
        """
        made = Source(
            self.columns,
            _chips(chips),
            _path("build", "include", include),
            _path("build", "source", source),
        )
        name, path = build.build(made, is_study=True)
        if path is not None:
            _load(path)
        return next(kernel for kernel in core.kernels() if kernel.name == name)


def _load(path: Path) -> None:
    try:
        core.load_library(path, on_request=True)
    except RuntimeError as error:
        raise BuildError(f"{error}. Removing the file has it built again") from error


def _chips(chips: Iterable[int] | None) -> tuple[int, ...]:
    if chips is None:
        return toolchain.chips_here()
    found = tuple(sorted(set(chips)))
    if not found or not all(type(chip) is int and chip >= 80 for chip in found):
        raise ValueError(f"build: chips is {found}, expected compute capabilities such as 80 or 90")
    return found


def _path(function: str, name: str, path: str | os.PathLike[str] | None) -> Path | None:
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{function}: {name} is {type_name(path)}, expected a path or None")
    found = Path(path).absolute()
    if not (found.is_dir() if name == "include" else found.is_file()):
        kind = "folder" if name == "include" else "file"
        raise ValueError(f"{function}: {name} is {path}, expected a {kind}")
    return found


def _modifiers(given: str | Iterable[str]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in rows.MODIFIERS:
            raise ValueError(f"Row: score_mods has {name!r}, expected some of {rows.MODIFIERS}")
    return tuple(name for name in rows.MODIFIERS if name in names)


def _check_column(name: str, value: object) -> None:
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"Row: {name} is {value!r}, expected one of {_CHOICES[name]}")
    if name not in _NUMBERS:
        return
    if type(value) is not int:
        raise TypeError(f"Row: {name} is {type_name(value)}, expected an int")
    if value <= 0:
        raise ValueError(f"Row: {name} is {value}, expected a positive int")
    if name.startswith("head_dim") and value % _HEAD_DIMS:
        raise ValueError(f"Row: {name} is {value}, expected a multiple of {_HEAD_DIMS}")
    if name == "warps" and value > _MOST_WARPS:
        raise ValueError(f"Row: warps is {value}, expected 1 to {_MOST_WARPS}")


def _study(columns: dict[str, str | int]) -> Study:
    """The columns for study that a row is given. A swizzle that is on or off is the tables' or
    none."""
    if isinstance(on := columns.get("swizzle"), bool):
        columns = {**columns, "swizzle": study.TABLES.swizzle if on else 0}
    if unknown := sorted(columns.keys() - {*_STUDY}):
        raise TypeError(f"Row: no column is called {unknown[0]!r}; those for study are {_STUDY}")
    for name, value in columns.items():
        known = study.COLUMNS[name].values
        if type(value) is not type(next(iter(known))) or value not in known:
            listed = f"0 to {len(known) - 1}" if len(known) > 4 else ", ".join(map(repr, known))
            raise ValueError(f"Row: {name} is {value!r}, expected one of {listed}")
    return Study(**columns)  # type: ignore[arg-type]


def _values(columns: TableRow) -> dict[str, Any]:
    """The columns by name, those for study among them."""
    values = dataclasses.asdict(columns)
    del values["name"]
    values |= values.pop("study")
    return values


def _nearest(given: dict[str, Any]) -> TableRow:
    """The row of the tables from which columns are taken that are not given."""

    def distance(row: TableRow) -> tuple[Any, ...]:
        head_dims = [
            (have < want, abs(have - want))
            for have, want in (
                (row.head_dim, given["head_dim"]),
                (row.head_dim_v, given["head_dim_v"]),
            )
        ]
        differences = len({*row.score_mods} ^ {*given["score_mods"]})
        return differences, *head_dims, row.dtype != given["dtype"]

    family = (given["arch"], given["direction"])
    return min((row for row in rows.table() if (row.arch, row.direction) == family), key=distance)


def _name_of(columns: TableRow) -> str:
    tile = f"m{columns.tile_m}n{columns.tile_n}s{columns.stages}w{columns.warps}"
    level = "" if columns.ptxas == "O3" else f"_{columns.ptxas.lower()}"
    return f"{columns.key_name()}_{tile}{level}{study.word(columns.study)}"
