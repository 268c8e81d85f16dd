"""Shared by all tests: `gpu` skips where there is no GPU, `device` runs on each kind of device."""

from __future__ import annotations

import pytest
import torch


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
    """Where a test runs: on the CPU, and on a GPU where there is one."""
    return request.param
