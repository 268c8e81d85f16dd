"""Which columns no kernel can have together."""

from __future__ import annotations

from .rows import TableRow
from .study import COLUMNS, SM80_FORWARD, SM90_BACKWARD, SM90_FORWARD, TABLES, changes


def refusal(row: TableRow) -> str:
    """Why no kernel can have the choices of a row, or ""."""
    family = (row.arch, row.direction)
    for name, value in changes(row.study):
        column = COLUMNS[name]
        allowed = column.kernels.get(family)
        if allowed is None:
            theirs = [other for other, known in COLUMNS.items() if family in known.kernels]
            return (
                f"{name} is {value!r}, and {row.arch} {row.direction} kernels have no such column: "
                f"{column.without[family]}. Theirs for study are {', '.join(theirs)}"
            )
        if value not in allowed:
            listed = ", ".join(map(repr, allowed))
            return (
                f"{name} is {value!r}, expected of an {row.arch} {row.direction} kernel {listed}: "
                f"{column.without[family]}"
            )
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
    if "qv" in row.score_mods and study.turns != TABLES.turns:
        return (
            f"turns is {study.turns!r} and score_mods has 'qv': of its two warpgroups one computes "
            "S and P for both, so that they go in step"
        )
    if (row.arch, row.direction) == SM90_FORWARD and study.turns == "on" and row.tile_m <= 64:
        return (
            f"turns is 'on' and tile_m is {row.tile_m}: one warpgroup computes 64 queries, and "
            "there is no other to take turns with"
        )
    if (row.arch, row.direction) == SM90_BACKWARD:
        return _refused_of_grad_q(row)
    return ""


# tile_m, tile_n and warps of the two kernels that keep no sums of dQ: a warpgroup has all keys of
# the one for dK and dV.
_WITHOUT_SUMS = (128, 64, 12)


def _refused_of_grad_q(row: TableRow) -> str:
    study = row.study
    if study.grad_q_sums == "none":
        if row.head_dim > 128:
            return (
                f"grad_q_sums is 'none' and head_dim is {row.head_dim}: above 128 the rows of "
                "the tables with blocks of 64 keys keep no sums of dQ either"
            )
        if (row.tile_m, row.tile_n, row.warps) != _WITHOUT_SUMS:
            return (
                f"grad_q_sums is 'none', tile_m is {row.tile_m}, tile_n {row.tile_n} and warps "
                f"{row.warps}, expected tile_m=128, tile_n=64, warps=12: the queries of the kernel "
                "for dQ, and the keys of that for dK and dV"
            )
    if study.grad_q != TABLES.grad_q and row.has_two_kernels():
        return (
            f"grad_q is {study.grad_q!r}, and the row keeps no sums of dQ: a kernel of its own "
            "computes dQ, and no step has a dQ"
        )
    if row.computes_in_chunks() and (study.grad_q, study.key_stages) != (
        TABLES.grad_q,
        TABLES.key_stages,
    ):
        return (
            f"grad_q is {study.grad_q!r}, key_stages {study.key_stages} and head_dim "
            f"{row.head_dim}: above 128 the steps of a kernel with sums of dQ have one order, and "
            "shared memory has room for one buffer of K"
        )
    if study.key_stages > 1 and (
        row.has_two_kernels()
        or "bias" in row.score_mods
        or row.computes_grad_q_first()
        or study.grad_q == "same"
    ):
        return (
            f"key_stages is {study.key_stages}: only kernels that keep sums of dQ have a second "
            "buffer of K, without a bias, whose tiles take its room, and where dQ is computed a "
            "step late and after dS (grad_q is 'late'): in the step itself a block leaves no dQ to "
            "the next one, and before dS there are no registers for it"
        )
    if study.grad_q == "first" and "softcap" in row.score_mods:
        return (
            "grad_q is 'first' and score_mods has 'softcap', with which P is computed after dP: "
            "there is no time before dS to compute dQ in"
        )
    return ""
