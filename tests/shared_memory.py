"""How much shared memory a row needs, counted as in the SharedMemory struct of its traits."""

from __future__ import annotations

from cute_attention.native.rows import TableRow

# Bytes that are not part of a tile, at most: padding, and in sm90 barriers and what a producer warp
# announces of the work to come.
BOOKKEEPING = {
    ("sm80", "forward"): 0,
    ("sm80", "backward"): 128,
    ("sm90", "forward"): 2048,
    ("sm90", "backward"): 1536,
}


STEP = 64  # queries, or keys, of a step of the sm90 backward rows with two kernels
CONSUMERS_OF_SM = 4  # of CTAs that share an SM: ForwardTraits::kConsumersOfSm


def ctas_of_sm(row: TableRow) -> int:
    """How many CTAs of an sm90 forward row share an SM: `kCtasOfSm` of forward_traits.h."""
    if (row.arch, row.direction) != ("sm90", "forward"):
        return 1
    consumers = row.warps // 4 - 1
    most_keys = {1: 64, 2: 80}.get(consumers, 0)
    is_small = row.tile_n <= most_keys and row.head_dim <= 64 and row.head_dim_v <= 64
    study = row.study
    chosen = study.grid == "one_tile" or study.turns == "on" or study.softmax == "exact"
    if not is_small or row.score_mods or chosen:
        return 1
    ctas = CONSUMERS_OF_SM // consumers
    columns = row.head_dim + row.head_dim_v  # of Q and O, and of K and V
    tiles = columns * (row.tile_m + row.stages * row.tile_n)
    return ctas if ctas * (2 * tiles + 2048 + 1024) <= 228 * 1024 else 1


def has_two_kernels(row: TableRow) -> bool:
    """Whether one kernel of a backward row computes dK and dV, and another dQ. Of the first, both
    consumer warpgroups have all keys of a CTA, where otherwise each has 64 of its own."""
    is_backward = (row.arch, row.direction) == ("sm90", "backward")
    return is_backward and row.warps != 4 * (1 + row.tile_n // 64)


def reads_cache(row: TableRow) -> bool:
    """Whether the kernels of a row read keys from a cache: `reads_cache` of config.h."""
    return row.direction == "forward" and not {"bias", "dropout"} & {*row.score_mods}


def _numbers_of_a_query(row: TableRow) -> int:
    """The bytes of the LSE and delta of a query in the backward, and of its random word."""
    return 4 * (3 if "dropout" in row.score_mods else 2)


def _largest_of_two_kernels(row: TableRow) -> int:
    columns = row.head_dim + row.head_dim_v
    # K and V have one buffer. Q, dO, LSE and delta have one for each stage, factors in fp32 two.
    grad_kv = 2 * columns * (row.tile_n + row.stages * STEP)
    grad_kv += _numbers_of_a_query(row) * row.stages * STEP
    grad_kv += 2 * 4 * STEP * row.tile_n
    # Q and dO have one buffer, K two and V one. If there is room, V has one more, and so has K.
    k, v = 2 * STEP * row.head_dim, 2 * STEP * row.head_dim_v
    grad_q = 2 * row.tile_m * columns + 2 * k + v
    room = 227 * 1024 - 2048 - grad_q
    grad_q += v + k if room >= v + k else v if room >= v else 0
    return max(grad_kv, grad_q)


def tile_bytes(row: TableRow) -> int:
    """The bytes of all tiles of a row's kernel, of several those of the largest."""
    if has_two_kernels(row):
        return _largest_of_two_kernels(row)
    q, o = row.tile_m * row.head_dim, row.tile_m * row.head_dim_v
    k_and_v = row.tile_n * (row.head_dim + row.head_dim_v)
    if "qv" in row.score_mods:  # with P and two numbers of a row, which one warpgroup hands over
        queries = row.tile_m * (row.head_dim + row.head_dim_v)
        return 2 * (queries + row.stages * k_and_v + row.tile_m * row.tile_n) + 128 * 8
    scores = row.tile_m * row.tile_n
    # K and V of the backward have one buffer, in sm90 K may have two. Q, dO, LSE and delta have one
    # for each stage.
    backward = 2 * (k_and_v + row.stages * (q + o))
    if row.arch == "sm90" and row.direction == "backward":
        overlaps = row.head_dim == 96 and row.study.grad_q in ("auto", "late")
        key_stages = row.study.key_stages or (2 if overlaps else 1)
        backward += 2 * (key_stages - 1) * row.tile_n * row.head_dim
    backward += _numbers_of_a_query(row) * row.stages * row.tile_m
    bias = 2 * row.stages * scores if "bias" in row.score_mods else 0  # in sm90
    if row.arch == "sm90" and row.direction == "backward":  # buffers of dS, and dQ in fp32
        buffers = 1 if row.head_dim > 128 else 2
        if row.tile_m > 64:  # a tile of the bias for the keys of each warpgroup, in one buffer
            bias //= row.stages
        tiles = backward + bias + 2 * buffers * scores + 4 * q
        # Plain rows have a buffer more for a part of dQ, one of two (sm90/grad_q_writer.h).
        writes = not row.score_mods and row.head_dim <= 128 and tiles + 2 * q + 2048 <= 227 * 1024
        return tiles + 2 * q if writes else tiles
    # Q has two buffers if they fit and CTAs share no SM. O has one where TMA stores it: where they
    # share one, and at head dims 64 and 128 without score features if it fits.
    if row.arch == "sm90":
        bookkeeping = BOOKKEEPING["sm90", "forward"]
        staged = 2 * row.stages * k_and_v + bias
        drops = row.head_dim <= 64 and {*row.score_mods} == {"alibi", "dropout"}
        if {*row.score_mods} == {"alibi"} or drops:  # ALiBi, which the tensor cores compute
            staged += 2 * row.tile_n * 8
        two = 2 * 2 * q + staged + bookkeeping <= 227 * 1024 and ctas_of_sm(row) == 1
        with_o = 2 * ((1 + two) * q + o) + staged
        plain = not row.score_mods and row.head_dim == row.head_dim_v in (64, 128)
        several = row.study.grid != "one_tile"  # of a CTA's tiles; the last is stored by threads
        fits = plain and several and with_o + bookkeeping <= 227 * 1024
        return with_o if fits or ctas_of_sm(row) > 1 else with_o - 2 * o
    if row.direction == "forward":  # at the end O takes the place of Q
        # Warps that have the same queries exchange P, and one number for each row.
        warps_along_n = row.warps // min(row.warps, row.tile_m // 32)
        shared = row.tile_m * (2 * row.tile_n + 4 * warps_along_n) if warps_along_n > 1 else 0
        bias = 2 * scores if "bias" in row.score_mods else 0
        return 2 * (max(q, o) + row.stages * k_and_v) + shared + bias
    # dS has one buffer, and so has P if warps exchange it. A bias lies where P will, but with
    # softcap, where it has a buffer too.
    warps_along_m = row.warps // (row.tile_n // 32)
    buffers = (1 if warps_along_m == 1 else 2) + ({"softcap", "bias"} <= {*row.score_mods})
    return backward + 2 * scores * buffers
