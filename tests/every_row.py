"""Rows of the kernel tables, forward and backward, for tests that run on each of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from cute_attention import Explanation, kernels
from cute_attention.native import rows
from test_kernels import LIMIT, SMALL_CHIP

ONLY = "CUTE_ATTENTION_ROWS"
ALL = rows.table()
SOFTCAP = 30.0  # leaves room for scores that differ, and bends the large ones


def sharing() -> list[rows.TableRow]:
    """Rows that share their key with another: dispatch never takes some of them for these
    shapes."""
    ordinary = [row for row in ALL if not row.name.endswith("_99kb")]
    keys = [row.key_name() for row in ordinary]
    return [row for row in ordinary if keys.count(row.key_name()) > 1]


def skip_unless_it_runs(row: rows.TableRow) -> None:
    """Skips a row that is not built, that this GPU cannot run, or that has its own process."""
    if row.name not in {kernel.name for kernel in kernels()}:
        pytest.skip(f"{row.name} is not built")
    if row.name.endswith("_99kb") != (os.environ.get(LIMIT) == SMALL_CHIP):
        pytest.skip(f"{row.name} is not for this size of shared memory")
    if row.arch == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{row.name} needs a GPU of compute capability 9.0")
    if ONLY in os.environ:
        if not re.search(os.environ[ONLY], row.name):
            pytest.skip(f"{row.name} is not chosen")
    elif row in sharing():
        pytest.skip(f"{row.name} runs in a process of its own")


def backend_of(row: rows.TableRow) -> str:
    """What to ask for so that the row runs and the gradient stays on kernels: a backend without
    backward rows leaves the backward to another only where nobody asks for it by name."""
    return "auto" if row.arch == "sm90" and row.direction == "forward" else row.arch


def assert_it_runs(row: rows.TableRow, answer: Explanation) -> None:
    """The call that `answer` is about runs on the row, and nothing of it on the reference."""
    reports = answer.forward if row.direction == "forward" else answer.backward
    report = next(report for report in reports if report.backend == row.arch)
    assert [candidate.name for candidate in report.rows if candidate.chosen] == [row.name]
    assert row.arch == (answer.chosen if row.direction == "forward" else answer.chosen_backward)
    assert "reference" not in (answer.chosen, answer.chosen_backward)


def options_of(row: rows.TableRow, options: dict[str, Any]) -> dict[str, Any]:
    return {"softcap": SOFTCAP, **options} if row.score_mod == "softcap" else options


def run_alone(files: list[str], select: str, environment: dict[str, str]) -> None:
    """The tests of some files once more, in a process that dispatches otherwise."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files, "-k", select]
    done = subprocess.run(
        command, env=dict(os.environ, **environment), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def is_built(row: rows.TableRow) -> bool:
    return row.name in {kernel.name for kernel in kernels()}
