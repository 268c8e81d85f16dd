"""Columns of a row beyond those of the tables, for study: what their values are, which kernels have
them, and how C++ is told (include/cute_attention/study.h)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Value = str | int
MOST_AHEAD = 64  # K blocks of an operand


@dataclass(frozen=True)
class Study:
    """What a row chooses. The defaults are what every row of the tables has."""

    copies: str = "async"
    loads: str = "eager"
    swizzle: int = 128
    fragments_ahead: int = 1
    softmax: str = "auto"
    probabilities: str = "registers"
    turns: str = "auto"
    grid: str = "persistent"
    grad_q: str = "auto"
    grad_q_sums: str = "auto"
    key_stages: int = 0
    fast_math: str = "on"


TABLES = Study()


@dataclass(frozen=True)
class Column:
    """A column for study. Of several values the first is that of the tables."""

    values: Mapping[Value, str]  # what C++ calls each of them
    words: Mapping[Value, str]  # and what it is called in the name of a row
    kernels: Mapping[tuple[str, str], tuple[Value, ...]]  # of which families, and with which values
    member: str = ""  # of StudyOf in C++; "" where a compiler's option makes the choice


SM80_FORWARD, SM80_BACKWARD = ("sm80", "forward"), ("sm80", "backward")
SM90_FORWARD, SM90_BACKWARD = ("sm90", "forward"), ("sm90", "backward")
_EVERY = (SM80_FORWARD, SM80_BACKWARD, SM90_FORWARD, SM90_BACKWARD)
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
        *(SM80_FORWARD, SM80_BACKWARD),
    ),
    "loads": _choice("Loads", {"eager": "Eager", "late": "Late"}, {"late": "late"}, SM80_FORWARD),
    "swizzle": Column(
        {width: str(width) for width in _WIDTHS},
        {width: f"swizzle{width}" for width in _WIDTHS},
        {SM80_FORWARD: _WIDTHS, SM80_BACKWARD: _WIDTHS, SM90_FORWARD: _WIDTHS[:-1]},
        "kSwizzle",
    ),
    "fragments_ahead": Column(
        {count: str(count) for count in _AHEAD},
        {count: f"ahead{count}" for count in _AHEAD},
        {SM80_FORWARD: _AHEAD},
        "kFragmentsAhead",
    ),
    "softmax": _choice(
        "Reference",
        {"auto": "WhereItPays", "optimistic": "Optimistic", "exact": "Exact"},
        {"optimistic": "optimistic", "exact": "exact"},
        *(SM80_FORWARD, SM90_FORWARD),
    ),
    "probabilities": _choice(
        "PathOfP",
        {"registers": "Registers", "shared": "Shared"},
        {"shared": "sharedp"},
        SM80_FORWARD,
    ),
    "turns": _choice(
        "Turns",
        {"auto": "WhereTheyPay", "on": "Taken", "off": "None"},
        {"on": "turns", "off": "noturns"},
        SM90_FORWARD,
    ),
    "grid": _choice(
        "Grid",
        {"persistent": "Persistent", "one_tile": "OneTile"},
        {"one_tile": "onetile"},
        *(SM90_FORWARD, SM90_BACKWARD),
    ),
    "grad_q": _choice(
        "GradQ",
        {"auto": "WhereItPays", "first": "First", "late": "Late", "same": "Same"},
        {"first": "dqfirst", "late": "dqlate", "same": "dqsame"},
        SM90_BACKWARD,
    ),
    "grad_q_sums": _choice(
        "GradQSums",
        {"auto": "WhereTheyFit", "none": "None"},
        {"none": "nosums"},
        SM90_BACKWARD,
    ),
    "key_stages": Column(
        {0: "0", 1: "1", 2: "2"},
        {1: "keys1", 2: "keys2"},
        {SM90_BACKWARD: (0, 1, 2)},
        "kKeyStages",
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
