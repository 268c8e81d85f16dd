"""For tests of rows from Python: a compiler that is none, and processes that build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cute_attention
from cute_attention.native import build, kernel_cache, rows

FAKE_NVCC = Path(__file__).resolve().parent / "fake_nvcc.py"
ROW = next(row for row in rows.table() if row.name == "sm80_fwd_bf16_d64")
SOURCE = build.Source(ROW, (80,))

# A process that builds needs no torch: without the package's __init__ it starts in no time.
PREAMBLE = f"""
import dataclasses, signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
package = sys.modules["cute_attention"] = types.ModuleType("cute_attention")
package.__path__ = {list(cute_attention.__path__)}
from cute_attention.native import build, rows
row = next(row for row in rows.table() if row.name == {ROW.name!r})
source = build.Source(row, (80,))
"""
BUILD = "print(build.build(source, is_study=True)[1])"

# What a process begins with that has torch, and asks for kernels of a GPU that is made up.
ON_A_GPU = """
import pytest, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
import cute_attention
from cute_attention import BackendError, attention, explain, kernels, rows
from cute_attention.dispatch.select import select
from cute_attention.problem import Problem

GPU = torch.device("cuda", 0)
KIND = Problem(dtype="fp16", device=GPU)
row = rows.Row("sm80", "forward", "fp16", head_dim=64, tile_n=32)
"""


def install_fake(folder: Path) -> dict[str, str]:
    """The environment in which `fake_nvcc.py` is the compiler and the cache is in `folder`."""
    program = folder / "nvcc"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{FAKE_NVCC}" "$@"\n')
    program.chmod(0o755)
    return {
        "CUDACXX": str(program),
        "FAKE_NVCC_LOG": str(folder / "calls"),
        kernel_cache.FOLDER: str(folder / "cache"),
    }


def calls(folder: Path) -> list[list[str]]:
    """What the fake compiler was called with: its process and its arguments."""
    log = folder / "calls"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def contents(folder: Path) -> list[str]:
    """The names of all that is in the cache."""
    cache = folder / "cache"
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def start(environment: dict[str, str], code: str = BUILD, **more: str) -> subprocess.Popen[str]:
    """A process that builds."""
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code],
        env=os.environ | environment | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process with torch and the fake compiler."""
    variables = os.environ | install_fake(folder) | {"FAKE_NVCC": "library"} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True
    )
