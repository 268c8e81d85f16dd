"""Runs each named row once, on whole tiles: what `check --ncu` measures.

Rows whose calls others would serve are launched by a process that has none of those.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_attention import _core, attention
from cute_attention.layouts.export import find_row
from cute_attention.ops import Call, Tensors, run_backward
from cute_attention.rows import TableRow
from cute_attention.survey import Features

HEADS = 2
TILES_M = 4
TILES_N = 8
SOFTCAP = 30.0
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def is_chosen(row: TableRow) -> bool | None:
    """Whether the call of `launch` is the row's; None where the row cannot serve it here."""
    problem = _core.Problem(
        direction=row.direction,
        dtype=row.dtype,
        seqlen_q=TILES_M * row.tile_m,
        seqlen_k=TILES_N * row.tile_n,
        heads=HEADS,
        heads_kv=HEADS,
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        softcap=SOFTCAP if row.score_mod == "softcap" else 0.0,
    )
    candidates = _core.explain(problem, torch.cuda.current_device())
    own = [candidate for candidate in candidates if candidate.name == row.name]
    return own[0].chosen if own and not own[0].reasons else None


def launch(row: TableRow) -> None:
    """One call: HEADS heads, TILES_M tiles of queries, TILES_N of keys."""

    def random(length: int, head_dim: int) -> Tensor:
        shape = (1, length, HEADS, head_dim)
        return torch.randn(shape, device="cuda", dtype=_DTYPES[row.dtype])

    q = random(TILES_M * row.tile_m, row.head_dim)
    k = random(TILES_N * row.tile_n, row.head_dim)
    v = random(TILES_N * row.tile_n, row.head_dim_v)
    softcap = SOFTCAP if row.score_mod == "softcap" else None
    if row.direction == "forward":
        attention(q, k, v, softcap=softcap, backend=row.arch)
    else:
        _launch_backward(row, Tensors(q, k, v, *[None] * 6), softcap or 0.0)
    torch.cuda.synchronize()


def _launch_backward(row: TableRow, tensors: Tensors, softcap: float) -> None:
    """The backward alone, of an output and LSE that no forward row has computed."""
    q, k, v = tensors[:3]
    call = Call(
        backend=row.arch,
        requested=row.arch,
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
        scale=row.head_dim**-0.5,
        softcap=softcap,
        window_left=-1,
        window_right=-1,
        dropout_p=0.0,
        deterministic=False,
        return_lse=False,
        features=Features(softcap=softcap > 0),
    )
    out = torch.randn(*q.shape[:3], v.shape[-1], device="cuda", dtype=q.dtype)
    lse = torch.randn(q.shape[0], HEADS, q.shape[1], device="cuda")
    run_backward(call, tensors, (torch.randn_like(out), None, out, lse), (False, False))


def _only(names: Sequence[str]) -> str:
    """CUTE_ATTENTION_ROWS that leaves these rows to choose from."""
    return f"^({'|'.join(names)})$"


def main(names: Sequence[str]) -> None:
    """Launches rows by name, those that are not chosen in a process that has no others."""
    passed = [name for name in names if _launch_if_chosen(find_row(name)) is False]
    pattern = os.environ.get("CUTE_ATTENTION_ROWS")
    if not passed or pattern not in (None, _only(names)):
        return
    groups = [passed]
    if pattern is not None and passed == list(names):  # each serves the other's call
        half = len(passed) // 2
        groups = [passed[:half], passed[half:]] if half else []
    for group in groups:
        command = (sys.executable, "-m", "cute_attention.layouts.launch", *group)
        subprocess.run(command, env=os.environ | {"CUTE_ATTENTION_ROWS": _only(group)}, check=True)


def _launch_if_chosen(row: TableRow) -> bool | None:
    chosen = is_chosen(row)
    if chosen:
        launch(row)
    return chosen


if __name__ == "__main__":
    main(sys.argv[1:])
