"""Peak memory of a step beyond its inputs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .steps import free_memory

MIB = 2.0**20
# There is no "bwd": a backward holds what its forward saved, so it is measured with it.
DIRECTIONS = ("fwd", "fwdbwd")


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most bytes that PyTorch's allocator holds during a step, beyond those it held before. The
    step's outputs count."""
    step()  # compiles, and fills caches that later calls keep
    return _cuda_peak(step, device) if device.type == "cuda" else _cpu_peak(step)


def _cuda_peak(step: Callable[[], object], device: torch.device) -> int:
    free_memory()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kept
    return peak


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Sends the process's standard error nowhere: the profiler's C++ code prints there on each
    use."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _cpu_peak(step: Callable[[], object]) -> int:
    """The same on a CPU, from the profiler's record of each allocation and release: the CPU
    allocator keeps no statistics."""
    with _silenced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = step()
    del kept
    session: Any = profiler.profiler
    events = [e for e in session.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return int(peak)
