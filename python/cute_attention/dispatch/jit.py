"""Rows of the tables that no loaded library has, built when a call needs them."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ..arguments import FEATURES
from ..cache_arguments import CACHE, QV
from ..errors import BuildError
from ..native import build, core, packages, rows
from ..native.build import Source
from ..native.rows import TableRow
from ..problem import Problem
from .backends import whole_vectors

ENVIRONMENT = "CUTE_ATTENTION_JIT"
_VALUES = {"": False, "0": False, "1": True}
_SERVED_BY_ALL = "sink"  # as kFeaturesOfAllRows of config.h
_READS_NO_CACHE = {"bias", "dropout"}  # rows with these do not: reads_cache of config.h
_LARGEST_SHARED_MEMORY = {"sm80": 163 * 1024, "sm90": 227 * 1024}  # of a CTA, as in config.h

_asked: bool | None = None  # by `jit`
_tried: set[str] = set()  # rows that this process has built, or could not build
_lock = threading.Lock()


def _renew_lock() -> None:
    """In a forked child, where the thread that held the lock does not exist."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def jit(on: bool) -> None:
    """Turn on or off that a call builds its kernel where no loaded library has it, for all threads
    of this process. It is off by default, and the environment variable CUTE_ATTENTION_JIT=1 turns
    it on; this function wins over that.

    With it, the first call of its kind looks which row of the tables (src/kernels/*.def) would
    serve it best. If that row is not loaded, nvcc builds it, once for all processes, with a
    message: about a minute, in which the call waits. If the row cannot be built, a warning says
    why, and the call runs on what there is.

    Args:
        on: whether calls build.

    Raises:
        TypeError: not a bool.

    Example:
        >>> from cute_attention import rows
        >>> rows.jit(False)
    """
    global _asked
    if not isinstance(on, bool):
        raise TypeError(f"jit: on is {type(on).__name__}, expected a bool")
    _asked = on
    core.choose_anew()


def is_on() -> bool:
    """Whether calls build what they need.

    Raises:
        ValueError: the environment says something else than 0 or 1.
    """
    if _asked is not None:
        return _asked
    text = os.environ.get(ENVIRONMENT, "")
    if text not in _VALUES:
        raise ValueError(f"attention: {ENVIRONMENT} is {text!r}, expected 0 or 1")
    return _VALUES[text]


def build_for(problem: Problem, requested: str) -> bool:
    """Builds and loads the row of the tables that serves a problem best, where it is not loaded.

    Args:
        problem: of a call.
        requested: the backend that the call asks for, or "auto".

    Returns:
        Whether a row was loaded.
    """
    device = problem.device
    if problem.row or device is None or device.type != "cuda":
        return False
    problem = problem._replace(
        head_dim=whole_vectors(problem.head_dim), head_dim_v=whole_vectors(problem.head_dim_v)
    )
    capability, shared_memory = chip_of(device)
    for family in packages.families_for(capability):
        if requested in ("auto", family) and (best := best_rows(problem, family, shared_memory)):
            with _lock:  # whoever comes second waits for the row
                return _build_first(best, problem, capability)
    return False  # no row of any family serves


def _build_first(best: list[TableRow], problem: Problem, capability: int) -> bool:
    """Builds and loads the first of some rows that serves a problem, where none is loaded. Returns
    whether one was loaded."""
    loaded = {kernel.name for kernel in core.kernels()}
    for row in best:
        if row.name in loaded:
            return False
        if row.name not in _tried and _build(row, capability) and _serves(row, problem):
            return True
    return False


def chip_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, and the bytes of shared memory of a CTA."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.shared_memory_per_block_optin


def best_rows(problem: Problem, family: str, shared_memory: int) -> list[TableRow]:
    """The rows of the tables, of a family, that serve a problem and are nearest to it. In the order
    in which they are tried: where a chip has less shared memory than the family's largest, those
    with small tiles first, since the others may have no room."""
    distances = {
        row: distance
        for row in rows.table()
        if row.arch == family and (distance := _distance(row, problem)) is not None
    }
    least = min(distances.values(), default=None)
    best = [row for row, distance in distances.items() if distance == least]
    if shared_memory < _LARGEST_SHARED_MEMORY[family]:
        best.sort(key=lambda row: row.tile_m * row.tile_n * row.stages)
    return best


def _distance(row: TableRow, problem: Problem) -> tuple[int, int, int] | None:
    """How far a row is from a problem, as `distance` of src/dispatch.cpp has it; None where it does
    not serve it, but for the shared memory, which only the compiled row knows."""
    if problem.features & CACHE and not _READS_NO_CACHE.isdisjoint(row.score_mods):
        return None
    unasked = row.unasked([*_score_mods(problem)])
    serves = (
        (row.direction, row.dtype) == (problem.direction, problem.dtype)
        and row.head_dim >= problem.head_dim
        and row.head_dim_v >= problem.head_dim_v
    )
    return (unasked, row.head_dim, row.head_dim_v) if serves and unasked is not None else None


def _score_mods(problem: Problem) -> Iterator[str]:
    """What a row must do to scores; "nonpositive scale" is in no row."""
    if problem.softcap:
        yield "softcap"
    for bit, word in FEATURES.items():
        if problem.features & bit and word != _SERVED_BY_ALL:
            yield word
    if problem.features & QV:
        yield "qv"


def _build(row: TableRow, capability: int) -> bool:
    """Builds and loads a row, and warns where that fails. Returns whether it is loaded."""
    _tried.add(row.name)
    try:
        _, path = build.build(Source(row, (capability,)), is_study=False)
        if path is not None:
            core.load_library(path, on_request=False)
    except (BuildError, RuntimeError) as error:
        warnings.warn(
            f"attention: {ENVIRONMENT} is on, but {row.name} could not be built: {error}",
            stacklevel=2,
        )
        return False
    return True


def _serves(row: TableRow, problem: Problem) -> bool:
    """Whether the core says that a row serves a problem, now that it is loaded."""
    assert problem.device is not None
    candidates = core.explain(problem, problem.device.index)
    return any(candidate.name == row.name and not candidate.reasons for candidate in candidates)
