"""A pytest plugin that runs tests marked `gpu` on a machine without one (`make emulate`).

The kernels run in the emulator (docs/emulator.md), and tensors that a test puts on "cuda" are on
the CPU. Tests of what the emulator has not, such as streams and graphs, are left out, and those of
rows that are not built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

# Where `make emulate` has built the libraries.
FOLDER = Path(os.environ.get("CUTE_ATTENTION_EMULATED", "build/emulated/lib")).resolve()
EMULATOR = "libcute_attention_emulator.so"  # beside them, and no kernel library
CAPABILITY = divmod(int(os.environ.get("CUTE_ATTENTION_EMULATOR_CC", "90")), 10)
GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
# Parts of the names of tests that need streams, graphs, torch.compile's code for GPUs, processes of
# their own with other rows, or more memory or time than there is.
NEEDS_A_GPU = (
    "stream", "graph", "compile", "2_to_the_31", "share_a_key", "99_kb", "row_is_chosen",
    "repeats", "bitwise", "in_a_process", "memory", "host_time", "before_the_next",
)  # fmt: skip


def on_cpu(value: Any) -> Any:
    """The CPU for a CUDA device or its name; anything else as it is."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


class CpuForCuda(TorchFunctionMode):
    """Functions of torch that are asked for a CUDA device use the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") == "to":
            args = tuple(on_cpu(value) for value in args)
        return func(*args, **kwargs)


class Stream:
    """Of a GPU that has ended each kernel when its launch returns."""

    cuda_stream = 0


@contextmanager
def emulated_cuda() -> Iterator[None]:
    """torch.cuda says that there is a GPU, and calls of attention find it."""
    from cute_attention.dispatch import backends, select
    from cute_attention.inference.lowered import lowered_forward
    from cute_attention.native import core
    from cute_attention.ops.cache import implement

    def at_gpu(problem: Any) -> Any:
        return problem._replace(device=GPU) if problem.device == CPU else problem

    choose, report = select._choose, backends.Kernels.report
    properties = SimpleNamespace(name="emulated GPU", total_memory=1 << 34)
    properties.multi_processor_count = int(os.environ.get("CUTE_ATTENTION_EMULATOR_SMS", "4"))
    properties.L2_cache_size = properties.multi_processor_count * (384 << 10)
    properties.shared_memory_per_block_optin = 1024 * (227 if CAPABILITY[0] == 9 else 163)
    patch = pytest.MonkeyPatch()
    patch.setenv("CUTE_ATTENTION_KERNEL_PATH", str(FOLDER))
    patch.setattr(select, "_choose", lambda problem, asked: choose(at_gpu(problem), asked))
    patch.setattr(backends.Kernels, "report", lambda self, problem: report(self, at_gpu(problem)))
    patch.setattr(core, "torch_library", lambda: FOLDER / "libcute_attention_torch.so")
    for name, value in {
        "is_available": True,
        "is_initialized": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_name": "emulated GPU",
        "get_device_properties": properties,
        "current_stream": Stream(),
        "synchronize": None,
        "empty_cache": None,
    }.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)
    implement("", lowered_forward, "CPU")  # Python registers one op of the kernels for CUDA
    try:
        check_libraries(FOLDER)
        yield
    finally:
        patch.undo()


def check_libraries(folder: Path) -> None:
    """Raises where the kernels of a folder would not run: every test would be skipped, which looks
    like a pass."""
    from cute_attention.native import binding, core

    found = [
        entry
        for entry in core.libraries()
        if Path(entry.path).parent == folder and Path(entry.path).name != EMULATOR
    ]
    reasons = [f"{entry.path}: {entry.error}" for entry in found if entry.error]
    if not any(entry.rows for entry in found):
        reasons.append(f"{folder} has no kernel library that is served")
    if unbound := binding.binding_error():
        reasons.append(f"{folder / 'libcute_attention_torch.so'}: {unbound}")
    if reasons:
        raise RuntimeError("the emulator cannot run its libraries: " + "; ".join(reasons))


_cuda = emulated_cuda()


def pytest_configure() -> None:
    _cuda.__enter__()


def pytest_unconfigure() -> None:
    _cuda.__exit__(None, None, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from cute_attention.native import core, rows

    built = {kernel.name for kernel in core.kernels()}
    kept, left_out = [], []
    for item in items:
        row = item.callspec.params.get("row") if hasattr(item, "callspec") else None
        is_absent = isinstance(row, rows.TableRow) and row.name not in built
        is_left_out = is_absent or any(part in item.name for part in NEEDS_A_GPU)
        (left_out if is_left_out else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which each test was skipped has shown nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and reporter is not None and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with CpuForCuda():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with CpuForCuda():
        return (yield)
