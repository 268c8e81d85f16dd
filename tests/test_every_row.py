"""Which rows of the kernel tables the GPU tests run, and which they skip with what reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import every_row
from cute_attention.native import rows
from every_row import LIMIT, ONLY, SMALL_CHIP, skip_unless_it_can_run, skip_unless_it_is_chosen

ROWS = {row.name: row for row in rows.table()}
ORDINARY, SMALL, HOPPER = (
    ROWS[name] for name in ("sm80_bwd_bf16_d128", "sm80_bwd_bf16_d128_99kb", "sm90_fwd_bf16_d192")
)
SHARED = ROWS["sm90_fwd_bf16_d96_m128"]  # has the same key as sm90_fwd_bf16_d96


def reason(skip, row: rows.TableRow) -> str:
    """Why a row is skipped; "" if it runs."""
    try:
        skip(row)
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return ""


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An A100 on which all rows but one are built."""
    built = [SimpleNamespace(name=name) for name in ROWS if name != "sm80_fwd_fp16_d32"]
    monkeypatch.setattr(every_row, "kernels", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.delenv(LIMIT, raising=False)
    monkeypatch.delenv(ONLY, raising=False)
    return monkeypatch


def test_rows_run_where_they_are_built_and_the_gpu_can(ampere):
    assert reason(skip_unless_it_can_run, ORDINARY) == ""
    assert "is not built" in reason(skip_unless_it_can_run, ROWS["sm80_fwd_fp16_d32"])
    assert "size of shared memory" in reason(skip_unless_it_can_run, SMALL)
    assert "compute capability 9.0" in reason(skip_unless_it_can_run, HOPPER)
    ampere.setenv(LIMIT, SMALL_CHIP)
    assert reason(skip_unless_it_can_run, SMALL) == ""
    assert "size of shared memory" in reason(skip_unless_it_can_run, ORDINARY)
    ampere.delenv(LIMIT)
    ampere.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert reason(skip_unless_it_can_run, HOPPER) == ""


def test_a_row_that_shares_its_key_runs_alone(ampere):
    ampere.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert reason(skip_unless_it_is_chosen, HOPPER) == ""
    assert reason(skip_unless_it_can_run, SHARED) == ""
    assert "a process of its own" in reason(skip_unless_it_is_chosen, SHARED)
    ampere.setenv(ONLY, f"^{SHARED.name}$")
    assert reason(skip_unless_it_is_chosen, SHARED) == ""
    assert "is not chosen" in reason(skip_unless_it_is_chosen, HOPPER)
