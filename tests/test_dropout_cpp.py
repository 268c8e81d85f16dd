"""The dropout bits of the kernels (core/dropout.h) are those of the Python reference."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from cute_attention.semantics import dropout

PROGRAM = Path(__file__).parents[1] / "build" / "cpp" / "tests" / "cpp" / "test_dropout"


@pytest.mark.skipif(not PROGRAM.exists(), reason="the C++ tests are not built: make cpp-test")
@pytest.mark.parametrize("seed", [0, 123, 2**63 + 11])
def test_the_bytes_agree(seed: int) -> None:
    heads, rows, cols = 3, 37, 70
    seed_tensor = dropout.as_seed(seed, "cpu")
    expected = dropout.random_bytes(seed_tensor, (0, heads), (0, rows), (0, cols))
    for head in range(heads):
        printed = subprocess.run(
            [PROGRAM, str(seed), str(head), str(rows), str(cols)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        got = [[int(byte) for byte in line.split()] for line in printed.splitlines()]
        assert torch.equal(torch.tensor(got), expected[head].long())
