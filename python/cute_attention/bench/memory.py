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
DIRECTIONS = (
    "fwd",
    "fwdbwd",
)  # whose memory is told: the backward alone holds what the forward saved


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Bytes that PyTorch's allocator holds at most during a step, its outputs included."""
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
    """Standard error closed at its file descriptor: the profiler announces itself on every use."""
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
    """The CPU allocator keeps no statistics, but the profiler sees each allocation and release."""
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
