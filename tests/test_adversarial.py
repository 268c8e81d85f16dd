"""Inputs made to break an online softmax, on every row of the kernel tables and on the reference
backend: output, LSE and all gradients against float64."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, explain
from cute_attention.bench.adversarial import Adversarial, select
from cute_attention.bench.roundings import NAMES, exact
from cute_attention.native import rows
from every_row import (
    ALL,
    DTYPES,
    LIMIT,
    ONLY,
    SOFTCAP,
    assert_it_runs,
    backend_of,
    fixture_of,
    is_built,
    options_of,
    run_alone,
    run_on_small_chip,
    sharing,
    skip_unless_it_is_chosen,
)
from tolerances import assert_within_roundings

# seqlen_q, seqlen_k, heads, heads_kv: some tiles each way; a few queries of many heads, which share
# a tile on sm90; and a few keys, for which its backward may have another kernel.
SHAPES = {"tiles": (257, 700, 2, 1), "few_queries": (3, 1500, 8, 1), "few_keys": (70, 60, 2, 1)}
MASKS = {"full": {}, "causal": {"causal": True}}
MODIFIED = {
    "softcap": {"softcap": SOFTCAP},
    "alibi": {"alibi_slopes": torch.tensor([0.5, -0.0625])},
}


def stacked(
    entries: list[Adversarial],
    shape: tuple[int, int, int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> tuple[list[Tensor], Tensor]:
    """q, k and v, where each batch entry has one entry of the table, and the gradient of the
    output."""
    seqlen_q, seqlen_k, heads, heads_kv = shape
    torch.manual_seed(0)
    pairs = []
    for entry in entries:
        q = torch.randn(1, seqlen_q, heads, dims[0], device=device)
        k = torch.randn(1, seqlen_k, heads_kv, dims[0], device=device)
        pairs.append(entry.make(q, k, dtype))
    q, k = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    v = torch.randn(len(entries), seqlen_k, heads_kv, dims[1], device=device).to(dtype)
    grad_out = torch.randn(len(entries), seqlen_q, heads, dims[1], device=device).to(dtype)
    return [t.requires_grad_() for t in (q, k, v)], grad_out


def check(
    entries: list[Adversarial],
    inputs: list[Tensor],
    grad_out: Tensor,
    backend: str,
    options: dict[str, Any],
    names: tuple[str, ...] = NAMES,
) -> None:
    """Compares the named results of one call with float64, for each batch entry by itself."""
    out, lse = attention(*inputs, backend=backend, return_lse=True, **options)
    grads = torch.autograd.grad(out, inputs, grad_out)
    results = dict(zip(NAMES, (out, lse, *grads), strict=True))
    truth = exact(*inputs, grad_out, **options)
    found = {name: truth.roundings(name, results[name]).tolist() for name in names}
    assert_within_roundings(found, [entry.name for entry in entries])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", [*MASKS.values(), *MODIFIED.values()], ids=[*MASKS, *MODIFIED])
def test_reference(options: dict[str, Any], dtype: torch.dtype) -> None:
    entries = select(["all"], dtype)
    inputs, grad_out = stacked(entries, (70, 300, 2, 1), (16, 8), dtype, "cpu")
    check(entries, inputs, grad_out, "reference", options)


row = fixture_of(ALL, skip_unless_it_is_chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_row(row: rows.TableRow, shape: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    """The gradients of a forward row go through its output and its LSE."""
    dtype, options = DTYPES[row.dtype], options_of(row, options, shape[2])
    entries = select(["all"], dtype)
    inputs, grad_out = stacked(entries, shape, (row.head_dim, row.head_dim_v), dtype, "cuda")
    answer = explain(*inputs, backend=backend_of(row), **options)
    assert_it_runs(row, answer)
    names = NAMES if row.direction == "forward" else NAMES[2:]
    if answer.chosen_backward == "reference":  # no row of this key is built for the backward
        names = NAMES[:2]
    check(entries, inputs, grad_out, backend_of(row), options, names)


OTHERS = "test_neighbours.py", "test_tile_counter.py"
FILES = [__file__, *(str(Path(__file__).with_name(name)) for name in OTHERS)]


@pytest.mark.gpu
@pytest.mark.skipif(ONLY in os.environ, reason="rows are chosen from outside")
@pytest.mark.skipif(LIMIT in os.environ, reason="runs the others in a process of their own")
@pytest.mark.parametrize("alone", sharing(), ids=lambda row: row.name)
def test_a_row_that_shares_its_key_with_another(alone: rows.TableRow) -> None:
    """Runs this file and others for a row that dispatch does not choose for every shape, in a
    process where it is the only row of its direction."""
    if not is_built(alone):
        pytest.skip(f"{alone.name} is not built")
    others = "_bwd_" if alone.direction == "forward" else "_fwd_"
    run_alone(FILES, alone.name, {ONLY: f"^{alone.name}$|{others}"})


@pytest.mark.gpu
@pytest.mark.skipif(ONLY in os.environ, reason="rows are chosen from outside")
@pytest.mark.skipif(LIMIT in os.environ, reason="runs the others in a process of their own")
def test_rows_for_chips_of_99_kb() -> None:
    """Runs the files in a process that takes this GPU for a smaller one."""
    run_on_small_chip(ALL, FILES)
