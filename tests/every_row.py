"""The rows of the kernel tables, forward and backward, for tests that run on each of them.

A test module writes `row = every_row.fixture_of(TABLE)`. It then has a fixture `row`, and its tests
run on every row of the table that is built and that this GPU can run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from cute_attention import Explanation, kernels
from cute_attention.native import rows

ONLY = "CUTE_ATTENTION_ROWS"  # dispatch chooses only among rows whose names match this variable
# Rows whose names end in _99kb are for chips whose shared memory is too small for the others. Their
# tests run in a process of their own, in which this variable makes the GPU pass for such a chip.
LIMIT, SMALL_CHIP = "CUTE_ATTENTION_SHARED_MEMORY", str(99 * 1024)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ALL = rows.table()
SOFTCAP = 30.0  # changes small scores little, and large ones much
DROPOUT = {"dropout_p": 0.3, "dropout_seed": 1234567890123}
# In turn for the heads: usual slopes, none, and one that favours distant keys. All are exact in 16
# bits, so that plain PyTorch has the same.
SLOPES = (0.5, 0.0625, 0.0, 1.0, -0.015625, 0.25)
# In turn for the heads. One number serves all queries and keys, so that it fits every shape;
# tests/test_bias.py has the others.
BIASES = (0.5, -3.0, 0.0, 8.0, -0.25)


def is_built(row: rows.TableRow) -> bool:
    return row.name in {kernel.name for kernel in kernels()}


def skip_unless_it_can_run(row: rows.TableRow) -> None:
    """Skips a row that is not built, or that the GPU cannot run for which this process takes it."""
    if not is_built(row):
        pytest.skip(f"{row.name} is not built")
    if row.name.endswith("_99kb") != (os.environ.get(LIMIT) == SMALL_CHIP):
        pytest.skip(f"{row.name} is not for this size of shared memory")
    if row.arch == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{row.name} needs a GPU of compute capability 9.0")


def fixture_of(
    table: Iterable[rows.TableRow], skip: Callable[[rows.TableRow], None] = skip_unless_it_can_run
) -> Any:
    """A fixture whose value is each row of the table in turn; `skip` skips rows that do not run.
    Rows with qv are left out: only calls with a cache have it, and tests/test_latent.py has
    those."""

    @pytest.fixture(
        params=[row for row in table if "qv" not in row.score_mods], ids=lambda row: row.name
    )
    def row(request: pytest.FixtureRequest) -> rows.TableRow:
        skip(request.param)
        return request.param

    return row


def sharing() -> list[rows.TableRow]:
    """Rows that have the same key as another row. Some would not run: dispatch never chooses them
    for the shapes of these tests."""
    ordinary = [row for row in ALL if not row.name.endswith("_99kb")]
    keys = [row.key_name() for row in ordinary]
    return [row for row in ordinary if keys.count(row.key_name()) > 1]


def skip_unless_it_is_chosen(row: rows.TableRow) -> None:
    """Skips a row that cannot run. Also skips a row that shares its key with another that is built,
    except in the process in which dispatch may choose only this row."""
    skip_unless_it_can_run(row)
    if ONLY in os.environ:
        if not re.search(os.environ[ONLY], row.name):
            pytest.skip(f"{row.name} is not chosen")
    elif row in sharing():
        key = row.key_name()
        others = [other for other in sharing() if other.key_name() == key and other != row]
        if any(map(is_built, others)):
            pytest.skip(f"{row.name} runs in a process of its own")


def skip_unless_one_feature_chooses_it(row: rows.TableRow) -> None:
    """Skips a row that dispatch does not choose for a call with one feature: those that serve every
    combination, except in the process in which there are no others, and those that demand several;
    tests/test_combinations_gpu.py has calls for these."""
    skip_unless_it_is_chosen(row)
    if row.serves_subsets():
        if ONLY not in os.environ:
            pytest.skip(f"{row.name} runs in a process of its own")
    elif len(row.score_mods) > 1:
        pytest.skip(f"{row.name} serves no call with one feature")


def backend_of(row: rows.TableRow) -> str:
    """The backend to ask for, so that the row runs and a kernel computes the gradient. sm90 has
    backward rows of some head dims only: if it is asked for by name, no other backend may compute
    the gradient."""
    return "auto" if row.arch == "sm90" and row.direction == "forward" else row.arch


def assert_it_runs(row: rows.TableRow, answer: Explanation) -> None:
    """Asserts that the call that `answer` explains runs on the row."""
    reports = answer.forward if row.direction == "forward" else answer.backward
    report = next(report for report in reports if report.backend == row.arch)
    assert [candidate.name for candidate in report.rows if candidate.chosen] == [row.name]
    assert row.arch == (answer.chosen if row.direction == "forward" else answer.chosen_backward)


def slopes_of(heads: int) -> torch.Tensor:
    slopes = torch.tensor(SLOPES, device="cuda").repeat(heads // len(SLOPES) + 1)
    return slopes[:heads].contiguous()


def biases_of(heads: int) -> torch.Tensor:
    """`[1, heads, 1, 1]`, in fp32."""
    biases = torch.tensor(BIASES, device="cuda").repeat(heads // len(BIASES) + 1)
    return biases[:heads].view(1, heads, 1, 1)


def options_of(
    row: rows.TableRow, options: dict[str, Any], heads: int, softcap: float = SOFTCAP
) -> dict[str, Any]:
    """The options, with those added that the row's score modifiers need."""
    needed: dict[str, Any] = {}
    if "softcap" in row.score_mods:
        needed["softcap"] = softcap
    if "alibi" in row.score_mods:
        needed["alibi_slopes"] = slopes_of(heads)
    if "bias" in row.score_mods:
        needed["bias"] = biases_of(heads)
    if "dropout" in row.score_mods:
        needed |= DROPOUT
    return {**needed, **options}


def skip_if_places_matter(row: rows.TableRow) -> None:
    """Skips a test that compares the same sequence in two places of a batch: dropout draws other
    bits there. tests/test_dropout_kernels.py has such a test for these rows."""
    if "dropout" in row.score_mods:
        pytest.skip("dropout draws other bits for another place in the batch")


def run_alone(files: list[str], select: str, environment: dict[str, str]) -> None:
    """Runs those tests of `files` whose names contain `select` once more, in a process with other
    environment variables. At least one of them must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files, "-k", select]
    done = subprocess.run(
        command, env=dict(os.environ, **environment), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def run_on_small_chip(table: Iterable[rows.TableRow], files: list[str]) -> None:
    """Runs the tests of `files` on those rows of the table that are for chips with 99 KB of shared
    memory, in a process that takes this GPU for such a chip."""
    if not any(row.name.endswith("_99kb") and is_built(row) for row in table):
        pytest.skip("no such row is built")
    run_alone(files, "99kb", {LIMIT: SMALL_CHIP})
