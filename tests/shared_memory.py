"""What the tiles of a row take of shared memory, by the SharedMemory struct of its traits."""

from __future__ import annotations

from cute_attention.native.rows import TableRow

# Shared memory that is no tile: barriers and notes between the warps of sm90, and paddings.
BOOKKEEPING = {("sm80", "forward"): 0, ("sm80", "backward"): 128, ("sm90", "forward"): 2048}


def tile_bytes(row: TableRow) -> int:
    q, o = row.tile_m * row.head_dim, row.tile_m * row.head_dim_v
    k_and_v = row.tile_n * (row.head_dim + row.head_dim_v)
    if row.arch == "sm90":  # a second Q where it fits beside the barriers; O never passes through
        bookkeeping = BOOKKEEPING["sm90", "forward"]
        two = 2 * (2 * q + row.stages * k_and_v) + bookkeeping <= 227 * 1024
        return 2 * ((1 + two) * q + row.stages * k_and_v)
    if row.direction == "forward":  # at the end, O takes Q's place
        # Warps of the same 32 queries share P, and a number of each row.
        warps_along_n = row.warps // min(row.warps, row.tile_m // 32)
        shared = row.tile_m * (2 * row.tile_n + 4 * warps_along_n) if warps_along_n > 1 else 0
        return 2 * (max(q, o) + row.stages * k_and_v) + shared
    # K and V stay; Q, dO, LSE and delta pass through their stages; dS, and P if warps share it.
    scores = row.tile_m * row.tile_n
    warps_along_m = row.warps // (row.tile_n // 32)
    return (
        2 * (k_and_v + row.stages * (q + o))
        + 8 * row.stages * row.tile_m
        + 2 * scores * (1 if warps_along_m == 1 else 2)
    )
