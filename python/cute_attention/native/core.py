"""The C++ core from Python, through ctypes: kernel libraries, rows, devices, dispatch. No torch."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..problem import Problem
from .packages import kernel_folders
from .rows import Columns

_PACKAGE = __name__.partition(".")[0]
LARGEST = 2**31 - 1  # of an int32
UNBOUNDED = LARGEST  # kUnbounded of params.h
NO_DEVICE = -1  # kNoDevice of c_api.h

_DIRECTIONS = {"forward": 0, "backward": 1}
_DTYPES = {"fp16": 0, "bf16": 1}
_OTHER_DTYPE = -1
# The sizes of a problem, and the argument that has each.
_SIZES = {
    "batch": "q",
    "seqlen_q": "q",
    "seqlen_k": "k",
    "heads": "q",
    "heads_kv": "k",
    "head_dim": "q",
    "head_dim_v": "v",
}


@dataclass(frozen=True)
class LibraryInfo:
    """A kernel library that was found; `error` says why it was refused, "" that it was not."""

    path: str
    name: str
    build: str
    rows: int
    error: str


@dataclass(frozen=True)
class Kernel(Columns):
    """A loaded kernel: a row of src/kernels/*.def or of `cute_attention.rows`, and what it takes of
    a GPU."""

    threads: int
    shared_memory_bytes: int
    features: tuple[str, ...]
    on_request: bool  # it serves only calls that ask for it

    def __hash__(self) -> int:  # of what no two loaded kernels have in common
        return hash(self.name)


@dataclass(frozen=True)
class Device:
    """A GPU that the kernel libraries see."""

    ordinal: int
    name: str
    compute_capability: int
    multiprocessors: int
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int
    l2_bytes: int


@dataclass(frozen=True)
class Candidate:
    """One row's answer to a problem.

    `chosen` is the fastest of its backend among those with the closest head dims; `reasons` say why
    it cannot serve, if it cannot. `num_splits` is the number of CTAs among which it divides the
    keys of a query.
    """

    name: str
    backend: str
    chosen: bool
    estimate_us: float | None
    reasons: list[str]
    on_request: bool = False
    num_splits: int = 1


_C_TYPES: dict[type, Any] = {
    str: ctypes.c_int32,
    int: ctypes.c_int32,
    bool: ctypes.c_int32,
    float: ctypes.c_float,
}


class _Problem(ctypes.Structure):
    """Problem of c_api.h: every field of ours but the device, words as the values of its enums."""

    _fields_ = [
        (name, _C_TYPES[type(default)])
        for name, default in Problem._field_defaults.items()
        if name != "device"
    ]


class _CostQuestion(ctypes.Structure):
    """CostQuestion of c_api.h; KernelConfig lies in it from tile_m to warps."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "arch",
            "head_dim",
            "head_dim_v",
            "tile_m",
            "tile_n",
            "stages",
            "warps",
            "threads",
            "shared_memory_bytes",
            "compute_capability",
            "multiprocessors",
            "shared_memory_per_multiprocessor",
        )
    ]


def library_folder() -> Path | None:
    """The folder of libcute_attention.so, or None where the package was not built.

    An editable install keeps its libraries beside the installed package, not beside these sources:
    both are in the package's search path.
    """
    for folder in sys.modules[_PACKAGE].__path__:
        if (Path(folder) / "lib" / "libcute_attention.so").is_file():
            return Path(folder) / "lib"
    return None


def available() -> bool:
    """Whether the core library is there."""
    return library_folder() is not None


def torch_library() -> Path | None:
    """The torch binding, for torch.ops.load_library after core(); None where it was not built."""
    folder = library_folder()
    path = folder / "libcute_attention_torch.so" if folder else None
    return path if path and path.is_file() else None


@functools.cache
def core() -> ctypes.CDLL:
    """The core library, loaded. Raises OSError where it is not there."""
    folder = library_folder()
    if folder is None:
        raise OSError("cute_attention: libcute_attention.so is not installed with this package")
    library = ctypes.CDLL(os.fspath(folder / "libcute_attention.so"))
    for name in ("build", "libraries", "kernels", "devices", "explain"):
        getattr(library, f"cute_attention_{name}_json").restype = ctypes.c_char_p
    library.cute_attention_last_error.restype = ctypes.c_char_p
    for kernels in kernel_folders():
        if library.cute_attention_add_kernel_folder(os.fsencode(kernels)) != 0:
            raise OSError(f"cute_attention: {library.cute_attention_last_error().decode()}")
    return library


def _read(function: Callable[..., bytes | None], *arguments: Any) -> Any:
    text = function(*arguments)
    if text is None:
        raise RuntimeError(core().cute_attention_last_error().decode())
    return json.loads(text)


def build_info() -> dict[str, Any]:
    """The core's version, kernel ABI and compiler."""
    return _read(core().cute_attention_build_json)


def libraries() -> list[LibraryInfo]:
    """Every kernel library found, refused ones included."""
    if not available():
        return []
    return [LibraryInfo(**entry) for entry in _read(core().cute_attention_libraries_json)]


def kernels() -> list[Kernel]:
    """The rows of all loaded kernel libraries."""
    if not available():
        return []
    entries = _read(core().cute_attention_kernels_json)
    tuples = ("score_mods", "features")
    return [Kernel(**entry | {name: tuple(entry[name]) for name in tuples}) for entry in entries]


generation = 0  # raised by whatever may change which kernel serves a call
_generation_lock = threading.Lock()


def choose_anew() -> None:
    """Have choices that were made be made again: another kernel may serve."""
    global generation
    with _generation_lock:
        generation += 1


def load_library(path: str | os.PathLike[str], on_request: bool) -> None:
    """Load one kernel library, as `cute_attention_load_library` of c_api.h does.

    Raises:
        OSError: the package was installed without its core.
        RuntimeError: the core refuses the library.
    """
    if core().cute_attention_load_library(os.fsencode(path), int(on_request)) != 0:
        raise RuntimeError(core().cute_attention_last_error().decode())
    choose_anew()


def _number_of(row: str) -> int:
    """The number of a loaded row; that of any row for "", and of none where it is not loaded."""
    if not row:
        return 0
    return core().cute_attention_row(row.encode()) or LARGEST


def devices() -> list[Device]:
    """The GPUs that the kernel libraries see. Initialises CUDA."""
    if not available():
        return []
    return [Device(**entry) for entry in _read(core().cute_attention_devices_json)]


def _window_bound(bound: int) -> int:
    """A side of a window as the core takes it: UNBOUNDED where it is open or larger than that."""
    return min(bound, UNBOUNDED) if bound >= 0 else UNBOUNDED


def check_sizes(problem: Problem) -> None:
    """Raise ValueError for a size that the core cannot take."""
    for size, argument in _SIZES.items():
        value = getattr(problem, size)
        if not 0 <= value <= LARGEST:
            raise ValueError(f"explain: {size} of {argument} is {value}, expected 0 to {LARGEST}")
    if problem.total_q > LARGEST:
        raise ValueError(f"explain: q has {problem.total_q} rows, expected at most {LARGEST}")


def _question(problem: Problem) -> _Problem:
    """A problem as the core takes it."""
    check_sizes(problem)
    values = problem._replace(
        window_left=_window_bound(problem.window_left),
        window_right=_window_bound(problem.window_right),
    )._asdict()
    del values["device"]
    values["direction"] = _DIRECTIONS[problem.direction]
    values["dtype"] = _DTYPES.get(problem.dtype, _OTHER_DTYPE)
    values["row"] = _number_of(problem.row)
    return _Problem(**values)


def explain(problem: Problem, device: int | None) -> list[Candidate]:
    """Every loaded row's answer to a problem on a GPU, or on none (None).

    Raises:
        RuntimeError: the kernel libraries cannot use the GPU.
        ValueError: a size that the core cannot take.
    """
    if not available():
        check_sizes(problem)
        return []
    question = _question(problem)
    ordinal = NO_DEVICE if device is None else device
    entries = _read(
        core().cute_attention_explain_json, ctypes.byref(question), ctypes.c_int32(ordinal)
    )
    return [Candidate(**entry) for entry in entries]


def estimate_us(
    problem: Problem, row: Columns, threads: int, shared_memory_bytes: int, device: Device
) -> float:
    """What the cost model expects a forward row to take, as `cute_attention_estimate` of c_api.h
    does: neither the row nor the GPU needs to be here.

    Raises:
        OSError: the package was installed without its core.
        ValueError: a size that the core cannot take.
        RuntimeError: a number of the row or of the device is not positive.
    """
    question = _CostQuestion(
        int(row.arch.removeprefix("sm")),
        row.head_dim,
        row.head_dim_v,
        row.tile_m,
        row.tile_n,
        row.stages,
        row.warps,
        threads,
        shared_memory_bytes,
        device.compute_capability,
        device.multiprocessors,
        device.shared_memory_per_multiprocessor,
    )
    found = ctypes.c_double()
    code = core().cute_attention_estimate(
        ctypes.byref(_question(problem)), ctypes.byref(question), ctypes.byref(found)
    )
    if code != 0:
        raise RuntimeError(core().cute_attention_last_error().decode())
    return found.value
