"""`rows.autotune` and the trial of a kernel, without a GPU: kernels are compiled by a compiler that
is none (fake_nvcc.py) and timed by a clock that says what it is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention
from cute_attention.errors import RowError
from cute_attention.native import core, rows
from cute_attention.native.core import Kernel
from cute_attention.problem import Problem
from cute_attention.rows import autotune, trial
from cute_attention.rows.autotune import fastest, measured, present_row
from cute_attention.rows.trial import fault_of
from tuning import run

needs_core = pytest.mark.skipif(not core.available(), reason="the core library is not installed")

SEARCH = """
import json, pathlib, sys, warnings
import torch
from cute_attention import rows
from cute_attention.native import kernel_cache
from cute_attention.native import rows as tables
from cute_attention.problem import Problem

import cute_attention.rows.autotune
tuner = sys.modules["cute_attention.rows.autotune"]
present = next(row for row in tables.table() if row.name == "sm80_fwd_bf16_d64")
CPU = torch.device("cpu")
problem = Problem(batch=2, seqlen_q=197, seqlen_k=197, device=CPU)
MS, WRONG, searches = {}, set(), []
name = "a GPU"
torch.cuda.get_device_name = lambda device: name
tuner.proven = lambda order, count, jobs: tuner_search(order, count)
tuner.fault_of = lambda kernel, trusted, problem: (
    "out is wrong" if kernel.tile_n in WRONG else ""
)
tuner.measured = lambda steps, device: searches.append(steps) or [MS.get(s, 2.0) for s in steps]

def tuner_search(order, count):
    from cute_attention.rows.candidates import Search
    chosen = [c for c in order if c.row.columns.tile_n in (32, 96, 112)
              and c.row.columns.tile_m == 128 and c.row.columns.warps == 4
              and c.row.columns.ptxas == "O1"]
    return Search(sorted(chosen, key=lambda c: c.row.columns.tile_n)[:count])

def tune(candidates=3, problem=problem):
    return tuner._remembered(present, problem, candidates, lambda kernel: kernel.tile_n)
"""


def searched(folder: Path, code: str, **environment: str) -> None:
    done = run(folder, SEARCH + code, **environment)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_core
def test_the_fastest_is_remembered_for_the_device_and_the_call(tmp_path: Path) -> None:
    searched(
        tmp_path,
        """
MS |= {64: 2.0, 32: 1.0, 96: 3.0, 112: 2.5}
kernel = tune()
assert kernel.tile_n == 32 and kernel.on_request and searches == [[64, 32, 96, 112]]
assert tune() == kernel and len(searches) == 1
(file,) = kernel_cache.folder().glob("choice-*.json")
found = json.loads(file.read_text())
assert (found["device"], found["row"]["tile_n"]) == ("a GPU", 32)
assert list(found["times_ms"].values()) == [2.0, 1.0, 3.0, 2.5]
assert file.stat().st_mode & 0o077 == 0

# Another device, other sizes, more candidates: each is another choice.
MS |= {96: 0.5}
name = "another GPU"
assert tune().tile_n == 96 and len(searches) == 2
name = "a GPU"
assert tune().tile_n == 32
assert tune(problem=problem._replace(seqlen_k=198)).tile_n == 96 and len(searches) == 3
assert tune(candidates=1).tile_n == 32 and len(searches) == 4
kernel_cache.clear()
assert not list(kernel_cache.folder().glob("choice-*.json"))
""",
    )
    # Another process only loads it.
    searched(tmp_path, "MS |= {32: 1.0}\nassert tune().tile_n == 32")
    searched(tmp_path, "assert tune().tile_n == 32 and searches == []")


@needs_core
def test_the_row_of_the_tables_stays_within_the_noise(tmp_path: Path) -> None:
    searched(tmp_path, "MS |= {64: 1.0, 32: 0.995}\nassert tune().tile_n == 64")


@needs_core
def test_wrong_ones_are_left_out_and_told(tmp_path: Path) -> None:
    searched(
        tmp_path,
        """
MS |= {32: 0.1}
WRONG.add(32)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    kernel = tune()
assert kernel.tile_n == 64 and searches == [[64, 96, 112]]
(warning,) = [w for w in told if "is left out" in str(w.message)]
assert "m128n32s1w4_o1 is left out: out is wrong" in str(warning.message)
""",
    )


@needs_core
def test_a_compiler_that_fails_is_an_error_and_leaves_no_choice(tmp_path: Path) -> None:
    searched(
        tmp_path,
        """
try:
    tune()
    raise SystemExit("it did not fail")
except rows.BuildError as error:
    assert "static assertion failed: too large" in str(error)
assert searches == [] and not list(kernel_cache.folder().glob("choice-*"))
""",
        FAKE_NVCC="fail",
    )


def test_wrong_arguments_are_refused() -> None:
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    kernel: Any = object()
    for options, error, message in (
        ({}, ValueError, "autotune: q is on cpu, expected a CUDA device"),
        ({"direction": "fwd"}, ValueError, "direction is 'fwd', expected 'forward' or 'backward'"),
        ({"candidates": 0}, ValueError, "candidates is 0, expected at least 1"),
        ({"candidates": 2.0}, TypeError, "candidates is a float, expected an int"),
        ({"kernel": kernel}, ValueError, "kernel is given, expected None"),
        ({"caussal": True}, TypeError, "caussal"),
        ({"causal": 3}, TypeError, "causal is an int"),
    ):
        with pytest.raises(error, match=message):
            autotune(q, q, q, **options)
    with pytest.raises(ValueError, match="k has shape"):
        autotune(q, q[..., :32], q)


def test_the_present_row_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = sys.modules["cute_attention.rows.autotune"]
    problem = Problem(head_dim=60, head_dim_v=60, device=torch.device("cpu"))
    for chip, backend, name in (
        ((90, 227 * 1024), "auto", "sm90_fwd_bf16_d64"),
        ((90, 227 * 1024), "sm80", "sm80_fwd_bf16_d64"),
        ((80, 163 * 1024), "auto", "sm80_fwd_bf16_d64"),
    ):
        monkeypatch.setattr(tuner, "chip_of", lambda device, chip=chip: chip)
        assert present_row(problem, backend).name == name
    with pytest.raises(RowError, match="no row of the tables computes the forward of bf16"):
        present_row(problem, "sm90")
    with pytest.raises(RowError, match="head dims 512 and 60"):
        present_row(problem._replace(head_dim=512))


def test_steps_take_turns_and_the_noise_decides() -> None:
    ran: list[str] = []

    def step(name: str) -> Callable[[], object]:
        return lambda: ran.append(name)

    times = measured([step("a"), step("b")], torch.device("cpu"))
    assert len(times) == 2 and min(times) > 0 and {*ran} == {"a", "b"}
    assert fastest([1.0, 2.0]) == 0
    assert fastest([1.0, 0.995, 0.999]) == 0
    assert fastest([1.0, 0.9, 0.8]) == 2


# --- the trial ------------------------------------------------------------------------------------


def kernel_of(direction: str, name: str) -> Kernel:
    row = next(row for row in rows.table() if row.direction == direction and row.dtype == "fp16")
    columns = {field: getattr(row, field) for field in rows.Columns.__dataclass_fields__}
    return Kernel(
        **columns | {"name": name},
        threads=128,
        shared_memory_bytes=1,
        features=(),
        on_request=True,
    )


ALL_FEATURES = 1 | 2 | 4  # bias, ALiBi, sink
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one value": lambda x: x.index_fill(1, torch.tensor([x.shape[1] - 1]), 9.0),
    "NaN": lambda x: x.masked_fill(x == x.flatten()[0], torch.nan),
    "scaled": lambda x: x * 1.01,
    "shifted": lambda x: x.roll(1, dims=1),
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("features", [0, ALL_FEATURES, 8])
def test_a_right_kernel_passes_its_trial(
    direction: str, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    stand_in(monkeypatch, lambda kernel, out: out, asked)
    problem = Problem(dtype="fp16", heads=8, heads_kv=2, features=features, head_dim=32)
    problem = problem._replace(head_dim_v=16, softcap=5.0 if features == 0 else 0.0)
    right, trusted = kernel_of(direction, "right"), kernel_of(direction, "trusted")
    assert fault_of(right, trusted, problem) == ""
    assert {options["kernel"].name for options in asked} == {"right", "trusted"}
    assert len(asked) == 2 * len(trial.LENGTHS) * len(trial.MASKS)
    for options in asked:
        assert ("bias" in options) == bool(features & 1)
        assert ("alibi_slopes" in options) == bool(features & 2)
        assert ("sink" in options) == bool(features & 4)
        assert ("dropout_p" in options) == bool(features & 8)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_fails_its_trial(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(kernel: Kernel, out: Tensor) -> Tensor:
        return FAULTS[fault](out) if kernel.name == "wrong" else out

    stand_in(monkeypatch, results, [])
    problem = Problem(dtype="fp16", heads=2, heads_kv=2, head_dim=32, head_dim_v=32)
    wrong, trusted = kernel_of("forward", "wrong"), kernel_of("forward", "trusted")
    said = fault_of(wrong, trusted, problem)
    assert said.startswith("out is wrong for 257 queries, 257 keys, {}: its error is ")
    backward = kernel_of("backward", "wrong"), kernel_of("backward", "trusted")
    assert fault_of(*backward, problem).startswith("d")


def stand_in(
    monkeypatch: pytest.MonkeyPatch, results: Callable[[Kernel, Tensor], Tensor], asked: list[Any]
) -> None:
    """Calls that ask for a kernel run on the reference backend; `results` changes the output."""

    def call(*tensors: Tensor, **options: Any) -> Tensor:
        if "kernel" not in options:
            return attention(*tensors, **options)
        asked.append(dict(options))
        kernel = options.pop("kernel")
        return results(kernel, attention(*tensors, **options, backend="reference"))

    monkeypatch.setattr(trial, "attention", call)
