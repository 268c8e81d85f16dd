"""Which columns no kernel can have together."""

from __future__ import annotations

from .rows import TableRow
from .study import COLUMNS, SM80_FORWARD, SM90_FORWARD, TABLES, changes


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
    if (row.arch, row.direction) == SM80_FORWARD:
        if row.stages > 2:
            return f"stages is {row.stages}, expected 1 or 2 of an sm80 forward kernel"
        if study.loads == "late" and row.stages != 1:
            return (
                f"loads is 'late' and stages is {row.stages}: a copy that starts when its tile is "
                "needed leaves no use for a second buffer, expected stages=1"
            )
    if "qv" in row.score_mods and (study.swizzle != TABLES.swizzle or study.turns != TABLES.turns):
        return (
            "swizzle or turns is another than that of the tables and score_mods has 'qv', whose "
            "kernel has neither column"
        )
    if (row.arch, row.direction) == SM90_FORWARD and study.turns == "on" and row.tile_m <= 64:
        return (
            f"turns is 'on' and tile_m is {row.tile_m}: one warpgroup computes 64 queries, and "
            "there is no other to take turns with"
        )
    return ""
