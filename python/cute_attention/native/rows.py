"""The Python reader of the kernel tables: every row, whether or not it was built here."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from .study import SM90_BACKWARD, TABLES, Study

_PACKAGE = __name__.partition(".")[0]
_ROW = re.compile(r"^CUTE_ATTENTION_(FORWARD|BACKWARD)\((.*)\)$", re.MULTILINE)
_PASSES = {"forward": "fwd", "backward": "bwd"}
_DTYPES = {"Float16": "fp16", "BFloat16": "bf16"}
_ARCHITECTURES = {
    "sm80": "Ampere and newer (compute capability >= 8.0)",
    "sm90": "Hopper (compute capability 9.0)",
}


# All members of score_mods, in the order in which they are applied. The first are those of a row
# that serves calls with any of them.
EVERY = ("softcap", "alibi", "bias", "dropout")
MODIFIERS = (*EVERY, "qv")


@dataclass(frozen=True)
class Columns:
    """What a table of src/kernels/*.def says of a kernel, and the kernel of itself."""

    name: str
    arch: str
    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    score_mods: tuple[str, ...]  # in the order in which they are applied
    tile_m: int
    tile_n: int
    stages: int
    warps: int


@dataclass(frozen=True)
class TableRow(Columns):
    """A row of src/kernels/*.def, in the words of `kernels()`; or one for study, which no table
    has."""

    ptxas: str = "O3"  # the level at which ptxas optimises
    study: Study = TABLES

    def key_name(self) -> str:
        """The name that the row's key determines; the row's actual name may have a suffix."""
        head_dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            head_dims += f"x{self.head_dim_v}"
        parts = [self.arch, _PASSES[self.direction], self.dtype, head_dims]
        return "_".join([*parts, *(("every",) if self.serves_subsets() else self.score_mods)])

    def serves_subsets(self) -> bool:
        """Whether a call may lack features of `score_mods`, each of them: `serves_subsets` of
        config.h."""
        return self.score_mods == EVERY

    def has_two_kernels(self) -> bool:
        """Whether one kernel computes dK and dV, and another dQ: not `kSumsGradQ` of
        sm90/backward_traits.h."""
        with_sums = self.head_dim <= 128 or self.tile_n > 64
        without_sums = not with_sums or self.study.grad_q_sums == "none"
        return (self.arch, self.direction) == SM90_BACKWARD and without_sums

    def computes_in_chunks(self) -> bool:
        """Whether dP and dS are computed for half of a step's queries after the other: `kInChunks`
        of sm90/backward_traits.h."""
        is_backward = (self.arch, self.direction) == SM90_BACKWARD
        return is_backward and self.head_dim > 128 and not self.has_two_kernels()

    def computes_grad_q_first(self) -> bool:
        """Whether dQ is computed before dS of a step: `kGradQFirst` of sm90/backward_traits.h."""
        where_it_pays = self.head_dim <= 64 and not self.score_mods
        return self.study.grad_q == "first" or (self.study.grad_q == "auto" and where_it_pays)

    def unasked(self, asked: Collection[str]) -> int | None:
        """How many features of `score_mods` a call does not ask for. None where the row does not
        serve the call: it lacks one, or has one in its kernels that the call lacks."""
        unasked = len({*self.score_mods} - {*asked})
        serves = {*asked} <= {*self.score_mods} and (not unasked or self.serves_subsets())
        return unasked if serves else None

    def line(self) -> str:
        """The row as a table has it.

        Raises:
            ValueError: it is a row for study.
        """
        if self.study != TABLES:
            raise ValueError(f"{self.name} is a row for study, which no table can have")
        columns = (
            self.name,
            self.arch.capitalize(),
            {ours: theirs for theirs, ours in _DTYPES.items()}[self.dtype],
            self.head_dim,
            self.head_dim_v,
            "|".join(name.capitalize() for name in self.score_mods) or "None",
            self.tile_m,
            self.tile_n,
            self.stages,
            self.warps,
            self.ptxas,
        )
        return f"CUTE_ATTENTION_{self.direction.upper()}({', '.join(map(str, columns))})"


def tables_folder() -> Path:
    """Where the tables lie: in the sources where this file does, else in the installed package."""
    sources = Path(__file__).resolve().parents[3] / "src" / "kernels"
    folders = [sources, *(Path(path) / "kernels" for path in sys.modules[_PACKAGE].__path__)]
    for folder in folders:
        if (folder / "forward.def").is_file():
            return folder
    raise FileNotFoundError("cute_attention: the kernel tables are not installed with this package")


def _modifiers(column: str) -> tuple[str, ...]:
    """The modifiers of the column score_mods: `Softcap|Alibi`, or None."""
    return tuple(name.lower() for name in column.split("|") if name != "None")


def parse(text: str) -> list[TableRow]:
    """The rows of one table."""
    rows = []
    for match in _ROW.finditer(text):
        columns = [column.strip() for column in match[2].split(",")]
        name, arch, dtype, head_dim, head_dim_v, score_mods, *how = columns
        tile_m, tile_n, stages, warps, ptxas = how
        rows.append(
            TableRow(
                name,
                arch.lower(),
                match[1].lower(),
                _DTYPES[dtype],
                int(head_dim),
                int(head_dim_v),
                _modifiers(score_mods),
                int(tile_m),
                int(tile_n),
                int(stages),
                int(warps),
                ptxas,
            )
        )
    return rows


@functools.cache
def table() -> tuple[TableRow, ...]:
    """Every row of every table."""
    files = sorted(tables_folder().glob("*.def"), reverse=True)  # forward before backward
    return tuple(row for file in files for row in parse(file.read_text()))


def support_matrix(rows: Iterable[TableRow]) -> str:
    """What the rows serve, as a Markdown table."""
    lines: dict[tuple[str, str, int, int, tuple[str, ...], str], list[str]] = {}
    for row in rows:
        has = "any" if row.serves_subsets() else "yes"
        key = (row.arch, row.direction, row.head_dim, row.head_dim_v, row.score_mods, has)
        dtypes = lines.setdefault(key, [])
        if row.dtype not in dtypes:
            dtypes.append(row.dtype)
    text = (
        "| kernels for | pass | head_dim, head_dim_v up to | dtype "
        "| softcap | ALiBi | bias | dropout | qv |\n"
    )
    text += "|---|---|---|---|---|---|---|---|---|\n"
    for (arch, direction, head_dim, head_dim_v, score_mods, has), dtypes in lines.items():
        served = (has if name in score_mods else "no" for name in MODIFIERS)
        text += (
            f"| {_ARCHITECTURES[arch]} | {direction} | {head_dim}, {head_dim_v} "
            f"| {', '.join(dtypes)} | {' | '.join(served)} |\n"
        )
    return text
