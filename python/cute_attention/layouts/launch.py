"""Runs each named row once, on whole tiles: what `check --ncu` measures.

Dispatch may take another row for the same call. A row that it does not take is launched by a new
process in which dispatch cannot choose the other rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attention import attention
from cute_attention.arguments import TABLE
from cute_attention.layouts.export import find_row
from cute_attention.native import binding, core
from cute_attention.native.rows import TableRow
from cute_attention.ops.schema import KERNELS
from cute_attention.problem import Problem

HEADS = 2
TILES_M = 4
TILES_N = 8
SOFTCAP = 30.0
DROPOUT_P, DROPOUT_SEED = 0.1, 1
_FEATURES = {"alibi": "alibi_slopes", "dropout": "dropout_p"}  # arguments that ask for modifiers
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def is_chosen(row: TableRow) -> bool | None:
    """Whether dispatch takes this row for the call that `launch` makes; None where the row cannot
    serve the call on this GPU."""
    problem = Problem(
        direction=row.direction,
        dtype=row.dtype,
        batch=1,
        seqlen_q=TILES_M * row.tile_m,
        seqlen_k=TILES_N * row.tile_n,
        heads=HEADS,
        heads_kv=HEADS,
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        softcap=SOFTCAP if "softcap" in row.score_mods else 0.0,
        features=sum(TABLE[name].bit for mod, name in _FEATURES.items() if mod in row.score_mods),
    )
    candidates = core.explain(problem, torch.cuda.current_device())
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
    softcap = SOFTCAP if "softcap" in row.score_mods else 0.0
    options: dict[str, Any] = {}
    if "alibi" in row.score_mods:
        options["alibi_slopes"] = torch.rand(HEADS, device="cuda")
    if "dropout" in row.score_mods:
        seed = torch.full((1,), DROPOUT_SEED, device="cuda")
        options |= {"dropout_p": DROPOUT_P, "dropout_seed": seed}
    if row.direction == "forward":
        attention(q, k, v, softcap=softcap, backend=row.arch, **options)
    else:
        _launch_backward(row, (q, k, v), softcap, options)
    torch.cuda.synchronize()


def _launch_backward(
    row: TableRow,
    tensors: tuple[Tensor, Tensor, Tensor],
    softcap: float,
    options: dict[str, Any],
) -> None:
    """Calls the backward with a random output and LSE, so that no forward kernel runs."""
    if unbound := binding.binding_error():
        raise RuntimeError(unbound)
    q, _, v = tensors
    out = torch.randn(*q.shape[:3], v.shape[-1], device="cuda", dtype=q.dtype)
    lse = torch.randn(q.shape[0], HEADS, q.shape[1], device="cuda")
    first = (row.arch, row.head_dim**-0.5, -1, -1, softcap)
    gradient = torch.randn_like(out)
    KERNELS.backward(gradient, None, out, lse, False, *tensors, *first, **options)


def _only(names: Sequence[str]) -> str:
    """The value of CUTE_ATTENTION_ROWS with which dispatch chooses among these rows alone."""
    return f"^({'|'.join(names)})$"


def main(names: Sequence[str]) -> None:
    """Launches the named rows: those that dispatch takes here, the others in new processes."""
    passed = [name for name in names if _launch_if_chosen(find_row(name)) is False]
    pattern = os.environ.get("CUTE_ATTENTION_ROWS")
    if not passed or pattern not in (None, _only(names)):
        return
    groups = [passed]
    if pattern is not None and passed == list(names):  # they take each other's calls: part them
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
