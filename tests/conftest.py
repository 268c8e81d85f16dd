"""For all tests: leaves out those marked `gpu` where there is no GPU, and has the fixtures `device`
and `kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from kernel_stand_ins import Kernels


def _has_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


# How many tests were left out.
LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests for GPUs. There are tens of thousands: to skip each one takes minutes."""
    if _has_gpu():
        return
    kept, left_out = [], []
    for item in items:
        (left_out if item.get_closest_marker("gpu") else kept).append(item)
    items[:] = kept
    config.stash[LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that prints the summary."""
    output = getattr(session.config, "workeroutput", {})
    output["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if output := getattr(node, "workeroutput", None):  # a worker that crashed has none
        node.config.stash[LEFT_OUT] = output["left_out"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{left_out} tests need an NVIDIA GPU of compute capability 8.0 or newer: not run"
        )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of a test. The test runs on the CPU, and also on a GPU if there is one."""
    return request.param


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Ops that stand in for kernels on the CPU, and count."""
    from kernel_stand_ins import standing_in

    with standing_in(monkeypatch) as stand_ins:
        yield stand_ins


@pytest.fixture(autouse=True)
def room_for_others() -> Iterator[None]:
    """Processes that run tests side by side share a GPU: none keeps much that its tests freed."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
