"""Time of a step: medians over rounds in which the contenders take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

WARMUP_MS = 25.0
MAX_REPEATS = 1000


@dataclass(frozen=True)
class Plan:
    """How one step is timed. `Timer.plan` finds this out while it warms the step up."""

    repeats: int
    head_start_cycles: int = 0  # so long the GPU waits before each repeat, while the host launches


class Timer(Protocol):
    def plan(self, step: Callable[[], object]) -> Plan: ...

    def sample(self, step: Callable[[], object], plan: Plan) -> list[float]:
        """Milliseconds of each repeat."""
        ...


def repeats_for(one_ms: float, time_ms: float) -> int:
    """How often a step of `one_ms` fits into `time_ms`; once at least."""
    return max(1, min(MAX_REPEATS, int(time_ms / max(one_ms, 1e-6))))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(round_medians: Sequence[float]) -> float:
    """How far apart the rounds lie: (largest - smallest) / median."""
    return (max(round_medians) - min(round_medians)) / median(round_medians)


class CpuTimer:
    """perf_counter around each call; caches stay warm, as they are in use."""

    def __init__(self, time_ms: float) -> None:
        self.time_ms = time_ms

    def plan(self, step: Callable[[], object]) -> Plan:
        step()
        start = time.perf_counter()
        step()
        return Plan(repeats_for(1e3 * (time.perf_counter() - start), self.time_ms))

    def sample(self, step: Callable[[], object], plan: Plan) -> list[float]:
        times = []
        for _ in range(plan.repeats):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return times


class CudaTimer:
    """CUDA events around each call, the L2 cache overwritten before it: the method of
    triton.testing.do_bench, so that figures compare with those published.

    One thing is added. Where the host needs longer to launch a step than the GPU needs to run it,
    events would measure the host. The GPU then spins before the first event until the host has
    queued all launches. `overhead` measures what the host costs.
    """

    FLUSH_BYTES = 256 * 2**20

    def __init__(self, device: torch.device, time_ms: float) -> None:
        self.time_ms = time_ms
        self.flush = torch.empty(self.FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def plan(self, step: Callable[[], object]) -> Plan:
        with torch.cuda.device_of(self.flush):  # events are recorded on the current device
            return self._plan(step)

    def sample(self, step: Callable[[], object], plan: Plan) -> list[float]:
        with torch.cuda.device_of(self.flush):
            return self._sample(step, plan)

    def _plan(self, step: Callable[[], object]) -> Plan:
        step()  # compiles, allocates
        one_ms, host_ms = self._trial(step, 1)
        if 5 * one_ms < self.time_ms:  # a step this slow needs no further trial
            one_ms, host_ms = self._trial(step, 5)
            for _ in range(min(MAX_REPEATS, int(WARMUP_MS / one_ms))):
                step()
            torch.cuda.synchronize()
        cycles = 0
        if host_ms > 0.5 * one_ms:
            # For a GPU at 2 GHz; one with a slower clock spins longer.
            cycles = int(1.5 * host_ms * 2e6)
        return Plan(repeats_for(one_ms, self.time_ms), cycles)

    def _trial(self, step: Callable[[], object], count: int) -> tuple[float, float]:
        """Milliseconds per step on the GPU, the flush included, and on the host."""
        start, end = self._event(), self._event()
        torch.cuda.synchronize()
        host = time.perf_counter()
        start.record()
        for _ in range(count):
            self.flush.zero_()
            step()
        end.record()
        host_ms = 1e3 * (time.perf_counter() - host) / count
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count, host_ms

    def _sample(self, step: Callable[[], object], plan: Plan) -> list[float]:
        events = [(self._event(), self._event()) for _ in range(plan.repeats)]
        for start, end in events:
            self.flush.zero_()
            if plan.head_start_cycles:
                torch.cuda._sleep(plan.head_start_cycles)
            start.record()
            step()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def make_timer(device: torch.device, time_ms: float) -> Timer:
    return CudaTimer(device, time_ms) if device.type == "cuda" else CpuTimer(time_ms)


def turns(count: int, round_index: int) -> list[int]:
    """The order of contenders in a round: it rotates, so that none always follows the same one."""
    return [(i + round_index) % count for i in range(count)]
