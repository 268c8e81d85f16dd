"""For all tests: skips those marked `gpu` where there is no GPU, and has the fixtures `device` and
`kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from kernel_stand_ins import Kernels


def _has_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU of compute capability 8.0 or newer")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


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
