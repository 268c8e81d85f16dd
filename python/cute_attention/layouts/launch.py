"""Runs each named row once, on whole tiles: what `check --ncu` measures."""

from __future__ import annotations

import sys

import torch

from cute_attention import attention
from cute_attention.layouts.export import find_row
from cute_attention.rows import TableRow

HEADS = 2
TILES_M = 4
TILES_N = 8
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def launch(row: TableRow) -> None:
    """One call that the row serves: HEADS x TILES_M tiles of queries, each over TILES_N of keys."""

    def random(length: int, head_dim: int) -> torch.Tensor:
        shape = (1, length, HEADS, head_dim)
        return torch.randn(shape, device="cuda", dtype=_DTYPES[row.dtype])

    q = random(TILES_M * row.tile_m, row.head_dim)
    k = random(TILES_N * row.tile_n, row.head_dim)
    v = random(TILES_N * row.tile_n, row.head_dim_v)
    softcap = 30.0 if row.score_mod == "softcap" else None
    attention(q, k, v, causal=row.mask == "causal", softcap=softcap, backend=row.arch)
    torch.cuda.synchronize()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        launch(find_row(name))
