"""The C++ core from Python, through ctypes: kernel libraries, rows, devices, dispatch. No torch."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
class Row:
    """A loaded kernel: a row of src/kernels/*.def, and what it takes of a GPU."""

    name: str
    arch: str
    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    score_mod: str
    tile_m: int
    tile_n: int
    stages: int
    warps: int
    threads: int
    shared_memory_bytes: int
    features: list[str]


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
class Problem:
    """The shape of one call.

    A window bound of -1 is unbounded; the sequence lengths of varlen are the longest.
    """

    direction: str = "forward"
    dtype: str = "bf16"
    batch: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    heads: int = 1
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    varlen: bool = False
    bias: bool = False
    alibi: bool = False
    sink: bool = False
    dropout: bool = False
    nonpositive_scale: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a size that the core cannot take."""
        for size, argument in _SIZES.items():
            value = getattr(self, size)
            if not 0 <= value <= LARGEST:
                raise ValueError(
                    f"explain: {size} of {argument} is {value}, expected 0 to {LARGEST}"
                )


@dataclass(frozen=True)
class Candidate:
    """One row's answer to a problem.

    `chosen` is the fastest of its backend among those with the closest head dims; `reasons` say why
    it cannot serve, if it cannot.
    """

    name: str
    backend: str
    chosen: bool
    estimate_us: float | None
    reasons: list[str]


class _Problem(ctypes.Structure):
    """Problem of c_api.h."""

    _fields_ = [
        ("direction", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("heads_kv", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("head_dim_v", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
        ("softcap", ctypes.c_float),
        ("features", ctypes.c_uint32),
    ]


def library_folder() -> Path | None:
    """The folder of libcute_attention.so, or None where the package was not built.

    An editable install keeps its libraries beside the installed package, not beside these sources:
    both are in the package's search path.
    """
    for folder in sys.modules[__package__].__path__:
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


def kernels() -> list[Row]:
    """The rows of all loaded kernel libraries."""
    if not available():
        return []
    return [Row(**entry) for entry in _read(core().cute_attention_kernels_json)]


def devices() -> list[Device]:
    """The GPUs that the kernel libraries see. Initialises CUDA."""
    if not available():
        return []
    return [Device(**entry) for entry in _read(core().cute_attention_devices_json)]


def _window_bound(bound: int) -> int:
    """A side of a window for the core: at most UNBOUNDED, as for a call."""
    return min(bound, UNBOUNDED) if bound >= 0 else UNBOUNDED


def explain(problem: Problem, device: int | None) -> list[Candidate]:
    """Every loaded row's answer to a problem on a GPU, or on none (None)."""
    if not available():
        return []
    features = (
        problem.bias,
        problem.alibi,
        problem.sink,
        problem.dropout,
        problem.nonpositive_scale,
    )
    question = _Problem(
        _DIRECTIONS[problem.direction],
        _DTYPES.get(problem.dtype, _OTHER_DTYPE),
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads,
        problem.heads_kv,
        problem.head_dim,
        problem.head_dim_v,
        _window_bound(problem.window_left),
        _window_bound(problem.window_right),
        problem.softcap,
        sum(1 << bit for bit, present in enumerate(features) if present),
    )
    ordinal = NO_DEVICE if device is None else device
    entries = _read(
        core().cute_attention_explain_json, ctypes.byref(question), ctypes.c_int32(ordinal)
    )
    return [Candidate(**entry) for entry in entries]
