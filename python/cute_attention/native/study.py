"""Columns of a row beyond those of the tables, for study: what their values are, which kernels have
them, and how C++ is told (include/cute_attention/study.h)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Value = str | int
Family = tuple[str, str]  # architecture and direction
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
    kernels: Mapping[Family, tuple[Value, ...]]  # of which families, and with which values
    member: str = ""  # of StudyOf in C++; "" where a compiler's option makes the choice
    without: Mapping[Family, str] = field(default_factory=dict)  # why families lack it, or a value


SM80_FORWARD, SM80_BACKWARD = ("sm80", "forward"), ("sm80", "backward")
SM90_FORWARD, SM90_BACKWARD = ("sm90", "forward"), ("sm90", "backward")
_EVERY = (SM80_FORWARD, SM80_BACKWARD, SM90_FORWARD, SM90_BACKWARD)
_WIDTHS = (128, 64, 32, 0)
_AHEAD = tuple(range(MOST_AHEAD + 1))


def _choice(
    enum: str,
    values: Mapping[Value, str],
    words: Mapping[Value, str],
    families: tuple[Family, ...],
    without: Mapping[Family, str],
) -> Column:
    names = {value: f"{enum}::{name}" for value, name in values.items()}
    kernels = dict.fromkeys(families, tuple(values))
    return Column(names, words, kernels, f"k{enum}", without)


def _both(arch: str, why: str) -> dict[Family, str]:
    return {(arch, "forward"): why, (arch, "backward"): why}


_NO_GRAD_Q = "a forward computes no dQ"
_NO_SWIZZLE = (
    "WGMMA takes a tile without a swizzle as blocks of 8 rows of 16 bytes, each of which fills all "
    "banks by itself: there is no conflict for a swizzle to take away"
)

COLUMNS: Mapping[str, Column] = {
    "copies": _choice(
        "Copies",
        {"async": "Async", "plain": "Plain"},
        {"plain": "plain"},
        (SM80_FORWARD, SM80_BACKWARD),
        _both("sm90", "TMA copies whole tiles for one thread, and no other thread holds them"),
    ),
    "loads": _choice(
        "Loads",
        {"eager": "Eager", "late": "Late"},
        {"late": "late"},
        (SM80_FORWARD,),
        {
            SM80_BACKWARD: "a CTA loads its block of K and V once, before its first step",
            **_both("sm90", "a producer warp loads as far ahead as the column stages has buffers"),
        },
    ),
    "swizzle": Column(
        {width: str(width) for width in _WIDTHS},
        {width: f"swizzle{width}" for width in _WIDTHS},
        {
            **dict.fromkeys((SM80_FORWARD, SM80_BACKWARD), _WIDTHS),
            **dict.fromkeys((SM90_FORWARD, SM90_BACKWARD), _WIDTHS[:-1]),
        },
        "kSwizzle",
        _both("sm90", _NO_SWIZZLE),
    ),
    "fragments_ahead": Column(
        {count: str(count) for count in _AHEAD},
        {count: f"ahead{count}" for count in _AHEAD},
        {SM80_FORWARD: _AHEAD, SM80_BACKWARD: _AHEAD},
        "kFragmentsAhead",
        _both("sm90", "WGMMA reads tiles from shared memory itself, and no thread loads fragments"),
    ),
    "softmax": _choice(
        "Reference",
        {"auto": "WhereItPays", "optimistic": "Optimistic", "exact": "Exact"},
        {"optimistic": "optimistic", "exact": "exact"},
        (SM80_FORWARD, SM90_FORWARD),
        dict.fromkeys(
            (SM80_BACKWARD, SM90_BACKWARD),
            "a backward has the LSE of the forward, and follows no maximum",
        ),
    ),
    "probabilities": _choice(
        "PathOfP",
        {"registers": "Registers", "shared": "Shared"},
        {"shared": "sharedp"},
        (SM80_FORWARD,),
        {
            SM80_BACKWARD: "a warp has its own part of P in registers and takes the parts of other "
            "warps from shared memory, as tile_m, tile_n and warps divide the tile",
            **_both("sm90", "a warpgroup computes whole rows of P, an operand where it lies"),
        },
    ),
    "turns": _choice(
        "Turns",
        {"auto": "WhereTheyPay", "on": "Taken", "off": "None"},
        {"on": "turns", "off": "noturns"},
        (SM90_FORWARD,),
        {
            **_both("sm80", "each warp issues its own mma.sync, and there are no warpgroups"),
            SM90_BACKWARD: "dQ of a step needs dS of all warpgroups, which keeps them together",
        },
    ),
    "grid": _choice(
        "Grid",
        {"persistent": "Persistent", "one_tile": "OneTile"},
        {"one_tile": "onetile"},
        (SM90_FORWARD, SM90_BACKWARD),
        _both("sm80", "a CTA of theirs computes one tile, or a part of one"),
    ),
    "grad_q": _choice(
        "GradQ",
        {"auto": "WhereItPays", "first": "First", "late": "Late", "same": "Same"},
        {"first": "dqfirst", "late": "dqlate", "same": "dqsame"},
        (SM90_BACKWARD,),
        {
            SM80_FORWARD: _NO_GRAD_Q,
            SM80_BACKWARD: "dQ is the last product of its step, after the barrier behind dS",
            SM90_FORWARD: _NO_GRAD_Q,
        },
    ),
    "grad_q_sums": _choice(
        "GradQSums",
        {"auto": "WhereTheyFit", "none": "None"},
        {"none": "nosums"},
        (SM90_BACKWARD,),
        {
            SM80_FORWARD: _NO_GRAD_Q,
            SM80_BACKWARD: "one kernel computes all gradients at every head dim, and adds up dQ",
            SM90_FORWARD: _NO_GRAD_Q,
        },
    ),
    "key_stages": Column(
        {0: "0", 1: "1", 2: "2"},
        {1: "keys1", 2: "keys2"},
        {SM90_BACKWARD: (0, 1, 2)},
        "kKeyStages",
        {
            **dict.fromkeys(
                (SM80_FORWARD, SM90_FORWARD), "the column stages counts the buffers of K and V"
            ),
            SM80_BACKWARD: "a CTA computes one block of keys, and there is no next one to load",
        },
    ),
    "fast_math": Column(
        {"on": "", "off": ""}, {"off": "nofastmath"}, dict.fromkeys(_EVERY, ("on", "off"))
    ),
}


def changes(study: Study) -> Iterator[tuple[str, Value]]:
    """The columns whose values are not those of the tables, and these values."""
    for column in dataclasses.fields(study):
        value = getattr(study, column.name)
        if value != getattr(TABLES, column.name):
            yield column.name, value


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
