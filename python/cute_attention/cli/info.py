"""`info`: what is installed, and which backend serves what."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Sequence

import torch

import cute_attention

from ..arguments import DTYPE_NAMES
from ..arguments import FEATURES as KERNEL_FEATURES
from ..dispatch.backends import survey
from ..dispatch.request import ENVIRONMENT
from ..native import core, packages
from ..native.binding import binding_error
from ..problem import Problem

HEAD_DIMS = (64, 96, 128, 192, 256)
FEATURES = {
    "full": Problem(),
    "causal": Problem(window_right=0),
    "window": Problem(window_left=0, window_right=0),
    "softcap": Problem(softcap=1.0),
    **{word: Problem(features=bit) for bit, word in KERNEL_FEATURES.items()},
}


def info() -> Iterator[str]:
    """The lines of the report. Initialises CUDA where there is a GPU."""
    yield from _packages()
    yield from _libraries()
    yield from _rows()
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    yield from _devices(devices)
    for device in devices:
        yield from serving(device)


def _packages() -> Iterator[str]:
    folder = os.path.dirname(os.path.abspath(cute_attention.__file__))
    yield f"cute_attention {cute_attention.__version__}, {folder}"
    yield f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"
    for name in (
        ENVIRONMENT,
        "CUTE_ATTENTION_CACHE",
        "CUTE_ATTENTION_CACHE_SIZE",
        "CUTE_ATTENTION_JIT",
        "CUTE_ATTENTION_KERNEL_PATH",
        "CUTE_ATTENTION_ROWS",
        "CUTE_ATTENTION_SHARED_MEMORY",
        "CUTE_ATTENTION_SPLITS",
        "CUDA_VISIBLE_DEVICES",
    ):
        if name in os.environ:
            yield f"{name}={os.environ[name]}"


def _libraries() -> Iterator[str]:
    yield "\nLibraries"
    if not core.available():
        yield "  none: the package was built without them, or is imported from its sources"
        return
    build = ", ".join(f"{key} {value}" for key, value in core.build_info().items())
    yield f"  core: {build}"
    yield f"  torch binding: {binding_error() or 'loaded'}"
    libraries = core.libraries()
    for library in libraries:
        state = library.error or f"{library.rows} rows, {library.build}"
        yield f"  {library.path}: {state}"
    found = {os.path.basename(library.path) for library in libraries}
    for family in packages.FAMILIES:
        if f"libcute_attention_{family}.so" not in found:
            command = packages.install_command(family)
            yield f"  no {family} kernels: {command}, or build with CUTE_ATTENTION_ARCHS"


def _rows() -> Iterator[str]:
    rows = cute_attention.kernels()
    if not rows:
        return
    yield "\nKernels"
    width = max(len(row.name) for row in rows)
    for row in rows:
        yield (
            f"  {row.name:<{width}}  tile {row.tile_m} x {row.tile_n}, {row.stages} stages, "
            f"{row.warps} warps, {row.shared_memory_bytes / 1024:g} KB shared memory"
        )


def _devices(devices: list[torch.device]) -> Iterator[str]:
    yield "\nDevices"
    for device in devices:
        if device.type == "cpu":
            yield f"  cpu: {torch.get_num_threads()} threads"
            continue
        properties = torch.cuda.get_device_properties(device)
        yield (
            f"  {device}: {properties.name}, compute capability {properties.major}."
            f"{properties.minor}, {properties.multi_processor_count} multiprocessors, "
            f"{properties.total_memory / 2**30:.0f} GB"
        )


def serving(device: torch.device) -> Iterator[str]:
    """Which backend serves forward and backward on `device`, by feature, dtype and head dim."""
    for direction in ("forward", "backward"):
        yield f"\n{direction.capitalize()} on {device}"
        yield from _serving_direction(direction, device)


def _serving_direction(direction: str, device: torch.device) -> Iterator[str]:
    kinds = [(dtype, d) for dtype in DTYPE_NAMES.values() for d in HEAD_DIMS]
    columns = [f"{dtype} d{d}" for dtype, d in kinds]
    served = {
        feature: [
            _first(
                problem._replace(
                    direction=direction, dtype=dtype, head_dim=d, head_dim_v=d, device=device
                )
            )
            for dtype, d in kinds
        ]
        for feature, problem in FEATURES.items()
    }
    if {name for row in served.values() for name in row} == {"reference"}:
        yield "  reference serves every call"
        return
    width = max(map(len, served))
    for feature, row in served.items():
        kernels = [
            f"{name} {column}"
            for name, column in zip(row, columns, strict=True)
            if name != "reference"
        ]
        rest = "reference for the rest" if kernels else "reference"
        yield f"  {feature:<{width}} {', '.join([*kernels, rest])}"


def _first(problem: Problem) -> str:
    return next(report.backend for report in survey(problem) if report.serves)


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m cute_attention info"
) -> int:
    """Prints the report; returns the exit code."""
    description = "Shows what is installed, and which backend serves what on each device."
    argparse.ArgumentParser(prog=prog, description=description).parse_args(arguments)
    print("\n".join(info()))
    return 0
