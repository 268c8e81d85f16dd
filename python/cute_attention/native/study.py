"""Columns of a row beyond those of the tables, for study: what their values are, which kernels have
them, and how C++ is told (include/cute_attention/study.h)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rows import TableRow

Value = str | int
MOST_AHEAD = 64  # K blocks of an operand


@dataclass(frozen=True)
class Study:
    """What a row chooses. The defaults are what every row of the tables has."""

    copies: str = "async"
    loads: str = "eager"
    swizzle: int = 128
    fragments_ahead: int = 1
    softmax: str = "optimistic"
    probabilities: str = "registers"
    turns: str = "auto"
    grid: str = "persistent"
    fast_math: str = "on"


TABLES = Study()


@dataclass(frozen=True)
class Column:
    """A column for study. Of several values the first is that of the tables."""

    values: Mapping[Value, str]  # what C++ calls each of them
    words: Mapping[Value, str]  # and what it is called in the name of a row
    kernels: Mapping[tuple[str, str], tuple[Value, ...]]  # of which families, and with which values
    member: str = ""  # of StudyOf in C++; "" where a compiler's option makes the choice


_SM80_FORWARD, _SM80_BACKWARD = ("sm80", "forward"), ("sm80", "backward")
_SM90_FORWARD, _SM90_BACKWARD = ("sm90", "forward"), ("sm90", "backward")
_EVERY = (_SM80_FORWARD, _SM80_BACKWARD, _SM90_FORWARD, _SM90_BACKWARD)
_WIDTHS = (128, 64, 32, 0)
_AHEAD = tuple(range(MOST_AHEAD + 1))


def _choice(
    enum: str, values: Mapping[Value, str], words: Mapping[Value, str], *families: tuple[str, str]
) -> Column:
    names = {value: f"{enum}::{name}" for value, name in values.items()}
    return Column(names, words, dict.fromkeys(families, tuple(values)), f"k{enum}")


COLUMNS: Mapping[str, Column] = {
    "copies": _choice(
        "Copies",
        {"async": "Async", "plain": "Plain"},
        {"plain": "plain"},
        *(_SM80_FORWARD, _SM80_BACKWARD),
    ),
    "loads": _choice("Loads", {"eager": "Eager", "late": "Late"}, {"late": "late"}, _SM80_FORWARD),
    "swizzle": Column(
        {width: str(width) for width in _WIDTHS},
        {width: f"swizzle{width}" for width in _WIDTHS},
        {_SM80_FORWARD: _WIDTHS, _SM80_BACKWARD: _WIDTHS, _SM90_FORWARD: _WIDTHS[:-1]},
        "kSwizzle",
    ),
    "fragments_ahead": Column(
        {count: str(count) for count in _AHEAD},
        {count: f"ahead{count}" for count in _AHEAD},
        {_SM80_FORWARD: _AHEAD},
        "kFragmentsAhead",
    ),
    "softmax": _choice(
        "Reference",
        {"optimistic": "Optimistic", "exact": "Exact"},
        {"exact": "exact"},
        *(_SM80_FORWARD, _SM90_FORWARD),
    ),
    "probabilities": _choice(
        "PathOfP",
        {"registers": "Registers", "shared": "Shared"},
        {"shared": "sharedp"},
        _SM80_FORWARD,
    ),
    "turns": _choice(
        "Turns",
        {"auto": "WhereTheyPay", "on": "Taken", "off": "None"},
        {"on": "turns", "off": "noturns"},
        _SM90_FORWARD,
    ),
    "grid": _choice(
        "Grid",
        {"persistent": "Persistent", "one_tile": "OneTile"},
        {"one_tile": "onetile"},
        _SM90_FORWARD,
    ),
    "fast_math": Column(
        {"on": "", "off": ""}, {"off": "nofastmath"}, dict.fromkeys(_EVERY, ("on", "off"))
    ),
}


def changes(study: Study) -> Iterator[tuple[str, Value]]:
    """The columns whose values are not those of the tables, and these values."""
    for field in dataclasses.fields(study):
        value = getattr(study, field.name)
        if value != getattr(TABLES, field.name):
            yield field.name, value


def word(study: Study) -> str:
    """The choices as the end of a row's name: "_plain_swizzle64"."""
    return "".join(f"_{COLUMNS[name].words[value]}" for name, value in changes(study))


def specialisation(study: Study, row: str) -> str:
    """The C++ text that tells the kernels of the row `row` its choices; empty for those of the
    tables. It belongs into the namespace cute_attention, before the kernels."""
    members = [
        f"  static constexpr auto {COLUMNS[name].member} = {COLUMNS[name].values[value]};\n"
        for name, value in changes(study)
        if COLUMNS[name].member
    ]
    if not members:
        return ""
    return f"template <>\nstruct StudyOf<{row}> : TableChoices {{\n{''.join(members)}}};\n"


def refusal(row: TableRow) -> str:
    """Why no kernel can have the choices of a row, or ""."""
    family = (row.arch, row.direction)
    for name, value in changes(row.study):
        allowed = COLUMNS[name].kernels.get(family)
        if allowed is None:
            theirs = [other for other, column in COLUMNS.items() if family in column.kernels]
            return (
                f"{name} is {value!r}, and {row.arch} {row.direction} kernels have no such column: "
                f"theirs for study are {', '.join(theirs)}"
            )
        if value not in allowed:
            listed = f"0 to {allowed[-1]}" if len(allowed) > 4 else ", ".join(map(repr, allowed))
            return f"{name} is {value!r}, expected of an {row.arch} {row.direction} kernel {listed}"
    return _refused_combination(row)


def _refused_combination(row: TableRow) -> str:
    study = row.study
    if (row.arch, row.direction) == _SM80_FORWARD:
        if row.stages > 2:
            return f"stages is {row.stages}, expected 1 or 2 of an sm80 forward kernel"
        if study.loads == "late" and row.stages != 1:
            return (
                f"loads is 'late' and stages is {row.stages}: a copy that starts when its tile is "
                "needed leaves no use for a second buffer, expected stages=1"
            )
        if study.probabilities == "shared" and "dropout" in row.score_mods:
            return (
                "probabilities is 'shared' and score_mods has 'dropout': probabilities are dropped "
                "from the operand in registers"
            )
    if (row.arch, row.direction) == _SM90_FORWARD and study.turns == "on" and row.tile_m <= 64:
        return (
            f"turns is 'on' and tile_m is {row.tile_m}: one warpgroup computes 64 queries, and "
            "there is no other to take turns with"
        )
    return ""
