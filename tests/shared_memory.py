"""How much shared memory a row needs, counted as in the SharedMemory struct of its traits."""

from __future__ import annotations

from cute_attention.native.rows import TableRow

# Bytes that are not part of a tile, at most: padding, and in sm90 barriers and what a producer warp
# announces of the work to come.
BOOKKEEPING = {
    ("sm80", "forward"): 0,
    ("sm80", "backward"): 128,
    ("sm90", "forward"): 2048,
    ("sm90", "backward"): 1024,
}


def tile_bytes(row: TableRow) -> int:
    q, o = row.tile_m * row.head_dim, row.tile_m * row.head_dim_v
    k_and_v = row.tile_n * (row.head_dim + row.head_dim_v)
    scores = row.tile_m * row.tile_n
    # K and V of the backward have one buffer. Q, dO, LSE and delta have one for each stage.
    backward = 2 * (k_and_v + row.stages * (q + o)) + 8 * row.stages * row.tile_m
    if row.arch == "sm90" and row.direction == "backward":  # two buffers of dS, and dQ in fp32
        return backward + 2 * 2 * scores + 4 * q
    if row.arch == "sm90":  # Q has two buffers if they fit; O does not go through shared memory
        bookkeeping = BOOKKEEPING["sm90", "forward"]
        two = 2 * (2 * q + row.stages * k_and_v) + bookkeeping <= 227 * 1024
        return 2 * ((1 + two) * q + row.stages * k_and_v)
    if row.direction == "forward":  # at the end O takes the place of Q
        # Warps that have the same queries exchange P, and one number for each row.
        warps_along_n = row.warps // min(row.warps, row.tile_m // 32)
        shared = row.tile_m * (2 * row.tile_n + 4 * warps_along_n) if warps_along_n > 1 else 0
        return 2 * (max(q, o) + row.stages * k_and_v) + shared
    # dS has one buffer, and so has P if warps exchange it.
    warps_along_m = row.warps // (row.tile_n // 32)
    return backward + 2 * scores * (1 if warps_along_m == 1 else 2)
