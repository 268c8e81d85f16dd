"""The layouts of rows as JSON, written by a C++ program that includes the kernels' own headers.

The program is built on demand. Its output is kept in a cache folder under a hash of all it was
built from, so that only an edited header or row is compiled again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_attention.layouts.errors import LayoutError, RefusedRow
from cute_attention.native import file_lock, rows, study
from cute_attention.native.refusals import refusal
from cute_attention.native.rows import TableRow


@dataclass(frozen=True)
class Family:
    """The rows of one architecture and direction, whose kernels one adapter describes."""

    kernels: str  # a template over rows, in src/layouts: the kernels of a row
    seconds: float  # to compile one more shape, on one core of an AMD EPYC


FAMILIES = {
    ("sm80", "forward"): Family("Sm80ForwardKernels", 1.8),
    ("sm80", "backward"): Family("Sm80BackwardKernels", 3.2),
    ("sm90", "forward"): Family("Sm90ForwardKernels", 2.7),
    ("sm90", "backward"): Family("Sm90BackwardKernels", 4.2),
}
_NAMES = {"fp16": "Float16", "bf16": "BFloat16"}


@dataclass(frozen=True)
class Request:
    """A row whose layouts are wanted. The row may be edited, and the kernels and headers may be
    others than the project's."""

    row: TableRow
    kernels: str = ""  # a template over rows, declared in `preamble`; default: that of the family
    preamble: str = ""
    include: Path | None = None  # searched before the project's headers

    def adapter(self) -> str:
        """The adapter's header, without its folder and ending."""
        return f"{self.row.arch}_{self.row.direction}"

    def kernels_of(self, tag: str) -> str:
        """The C++ type that lists the kernels of the row `tag`."""
        family = FAMILIES[self.row.arch, self.row.direction]
        return f"{self.kernels or 'layouts::' + family.kernels}<{tag}>"

    def shape(self) -> tuple[object, ...]:
        """Requests with the same shape have the same layouts: dtype, mask and score modifier change
        none. Compiled in one program they take little longer than one of them, as C++ derives the
        layouts once."""
        row = self.row
        tile = (row.tile_m, row.tile_n, row.stages, row.warps)
        return (*self._headers(), row.head_dim, row.head_dim_v, *tile, row.study, self.kernels)

    def _headers(self) -> tuple[str, str]:
        return self.adapter(), str(self.include or "")


def described(row: TableRow) -> bool:
    """Whether there is an adapter for the row's architecture and direction."""
    return (row.arch, row.direction) in FAMILIES and (
        sources() / "src" / "layouts" / f"{row.arch}_{row.direction}.h"
    ).is_file()


def find_row(name: str) -> TableRow:
    """The row of the tables with this name."""
    table = {row.name: row for row in rows.table()}
    if name not in table:
        raise LayoutError(f"no row is called {name!r}; the tables have: {', '.join(table)}")
    return table[name]


def edited(row: TableRow, changes: Sequence[str]) -> TableRow:
    """The row with columns changed: ["tile_n=96", "stages=2"]."""
    values: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    columns = {field.name: field.type for field in dataclasses.fields(TableRow)}
    columns |= {field.name: field.type for field in dataclasses.fields(study.Study)}
    for change in changes:
        column, _, value = change.partition("=")
        if column not in columns or column in ("name", "study") or not value:
            names = ", ".join(name for name in columns if name not in ("name", "study"))
            raise LayoutError(f"--set {change}: expected COLUMN=VALUE, COLUMN one of {names}")
        is_number = columns[column] in ("int", int)
        if is_number and not value.isdigit():
            raise LayoutError(f"--set {change}: {column} is an integer")
        into = chosen if column in study.COLUMNS else values
        into[column] = int(value) if is_number else value
        if column in study.COLUMNS and into[column] not in study.COLUMNS[column].values:
            listed = ", ".join(map(str, study.COLUMNS[column].values))
            raise LayoutError(f"--set {change}: expected one of {listed}")
    name = "+".join([row.name, *changes])
    made = dataclasses.replace(
        row, **values, name=name, study=dataclasses.replace(row.study, **chosen)
    )
    if refused := refusal(made):
        raise LayoutError(f"--set: {refused}")
    return made


@functools.cache
def sources() -> Path:
    """The folder with the C++ headers: the checkout that these modules are of, else the package."""
    folders = [Path(__file__).resolve().parents[3]]
    folders += [Path(folder) for folder in sys.modules["cute_attention"].__path__]
    for folder in folders:
        if (folder / "src" / "layouts" / "export.h").is_file() and (
            folder / "include" / "cute_attention"
        ).is_dir():
            return folder
    raise LayoutError(
        "the C++ headers that the layout lab reads, include/ and src/layouts/, are neither in a "
        f"checkout around {Path(__file__).parents[1]} nor installed with the package: install "
        "cute-attention anew (pip install --force-reinstall cute-attention)"
    )


@functools.cache
def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise LayoutError("no C++ compiler was found: install g++ or set CXX")


def _package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


@functools.cache
def _include_flags() -> list[str]:
    package = _package_folder("cutlass_library")
    cutlass = Path(os.environ["CUTLASS_DIR"]) if "CUTLASS_DIR" in os.environ else None
    if cutlass is None and package is not None:
        cutlass = package / "source"
    if cutlass is None or not (cutlass / "include" / "cute").is_dir():
        raise LayoutError(
            "the CuTe headers were not found: pip install --no-deps nvidia-cutlass==4.2.0.0, or "
            "set CUTLASS_DIR to a checkout of CUTLASS 4.2.0"
        )
    nvidia = _package_folder("nvidia")
    folders = [nvidia / "cu13"] if nvidia else []
    folders += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders.append(Path("/usr/local/cuda"))
    cuda = [folder / "include" for folder in folders]
    # PyTorch brings headers of the runtime without those of `crt`, which they include.
    needed = ("cuda_runtime_api.h", "crt/host_defines.h")
    cuda = [folder for folder in cuda if all((folder / name).is_file() for name in needed)]
    if not cuda:
        raise LayoutError(
            'the CUDA headers were not found: pip install "cuda-toolkit[cudart,cccl,crt]==13.*"'
        )
    return [
        *("-isystem", str(cutlass / "include")),
        *("-isystem", str(cuda[0])),
        *("-isystem", str(cuda[0] / "cccl")),
    ]


@functools.cache
def _version() -> str:
    version = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True)
    return version.stdout


def _jobs() -> int:
    return min(os.cpu_count() or 1, 8)


def _memory_flags() -> list[str]:
    """Options that let GCC use half of the machine's memory, shared by all jobs, before it collects
    garbage. By default that collection takes a third of the time."""
    if "Free Software Foundation" not in _version():
        return []
    kilobytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
    return [f"--param=ggc-min-heapsize={kilobytes // (2 * _jobs())}"]


@functools.cache
def _sources_hash(include: Path | None) -> str:
    state = hashlib.sha256((sources() / "src" / "json.h").read_bytes())
    folders = [sources() / "include", sources() / "src" / "layouts"]
    for folder in folders + ([include] if include else []):
        for file in sorted(folder.rglob("*.h")):
            state.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    state.update((_version() + " ".join(_include_flags())).encode())
    return state.hexdigest()


def cache_folder() -> Path:
    """Where exported layouts are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cute-attention" / "layouts"


def _cached(request: Request) -> Path:
    row = dataclasses.replace(request.row, name="", ptxas="")  # which change no layout
    text = repr(row) + request.kernels + request.preamble
    state = hashlib.sha256((text + _sources_hash(request.include)).encode())
    return cache_folder() / f"{state.hexdigest()[:32]}.json"


def _tag(index: int, row: TableRow) -> str:
    key = (
        f"Arch::{row.arch.capitalize()}, Direction::{row.direction.capitalize()}, "
        f"DType::{_NAMES[row.dtype]}, {row.head_dim}, {row.head_dim_v}, "
        + (" | ".join(f"score_mods::{name.capitalize()}" for name in row.score_mods) or "0u")
    )
    config = f"{row.tile_m}, {row.tile_n}, {row.stages}, {row.warps}"
    return (
        f"struct Row{index} {{\n"
        f'  static constexpr char const* kName = "{row.name}";\n'
        f"  static constexpr KernelKey kKey = kernel_key({key});\n"
        f"  static constexpr KernelConfig kConfig{{{config}}};\n}};\n"
        + study.specialisation(row.study, f"Row{index}")
    )


def _program(requests: Sequence[Request]) -> str:
    adapters = sorted({request.adapter() for request in requests})
    lines = ['#include "cute_attention/study.h"\n', '#include "layouts/export.h"\n']
    lines += [f'#include "layouts/{adapter}.h"\n' for adapter in adapters]
    lines.append("namespace cute_attention {\n")
    lines += dict.fromkeys(request.preamble for request in requests)
    lines += [_tag(index, request.row) for index, request in enumerate(requests)]
    lines.append("}  // namespace cute_attention\n")
    lines.append("using namespace cute_attention;\nint main(int, char** arguments) {\n")
    for index, request in enumerate(requests):
        kernels = request.kernels_of(f"Row{index}")
        lines.append(f'  layouts::export_row<{kernels}>(arguments[1], "{index}");\n')
    lines.append("}\n")
    return "".join(lines)


def _why(errors: str) -> str:
    """The lines of a compiler's output that say what is wrong."""
    lines = [line for line in errors.splitlines() if "error:" in line]
    asserted = [line for line in lines if "static assertion failed" in line]
    said = [line.split("error: ", 1)[1] for line in asserted or lines[:3]]
    return "; ".join(dict.fromkeys(said)) or errors[-500:]


def _build(requests: Sequence[Request]) -> str:
    """Compiles and runs the program of some rows; returns what the compiler objects to."""
    with tempfile.TemporaryDirectory(prefix="cute-attention-") as folder:
        source = Path(folder) / "export.cpp"
        source.write_text(_program(requests))
        own = [requests[0].include] if requests[0].include else []
        own += [sources() / "include", sources() / "src"]
        flags = ["-std=c++17", "-O0", "-w", *_memory_flags(), *(f"-I{path}" for path in own)]
        # WGMMAs of all N. For kernels, cmake/kernels.cmake asks for them where a row has unusual
        # ones.
        flags.append("-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED")
        command = [_compiler(), *flags, *_include_flags(), str(source), "-o", f"{folder}/export"]
        compiled = subprocess.run(command, capture_output=True, text=True)
        if compiled.returncode != 0:
            return _why(compiled.stderr)
        subprocess.run([f"{folder}/export", folder], check=True)
        for index, request in enumerate(requests):
            with tempfile.NamedTemporaryFile(dir=cache_folder(), delete=False) as file:
                file.write((Path(folder) / f"{index}.json").read_bytes())
            os.replace(file.name, _cached(request))
    return ""


def _build_each(requests: Sequence[Request]) -> None:
    """Builds all rows in one program. If C++ refuses it, builds each half by itself, until it is
    known which row C++ refuses."""
    refused = _build(requests)
    if refused and len(requests) > 1:
        _build_each(requests[: len(requests) // 2])
        _build_each(requests[len(requests) // 2 :])
    elif refused:
        raise RefusedRow(f"{requests[0].row.name} does not compile: {refused}")


def export(requests: Iterable[Request]) -> list[list[dict[str, Any]]]:
    """The layouts of the kernels of each request, in order, as the C++ program wrote them."""
    wanted = list(requests)
    for request in wanted:
        if not described(request.row):
            raise LayoutError(
                f"{request.row.name}: no adapter describes {request.row.arch} "
                f"{request.row.direction} kernels; it would be src/layouts/{request.adapter()}.h"
            )
    if _missing(wanted):
        cache_folder().mkdir(parents=True, exist_ok=True)
        # One process at a time: two would share cores and memory, and often want the same rows.
        with file_lock.locked(cache_folder() / "compiling.lock", waiting=_say_who_compiles):
            jobs = _jobs()
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                list(pool.map(_build_each, _batches(_missing(wanted), jobs)))
    return [json.loads(_cached(request).read_text()) for request in wanted]


def _missing(requests: Iterable[Request]) -> list[Request]:
    """Those whose layouts are not in the cache, once each."""
    return [request for request in dict.fromkeys(requests) if not _cached(request).is_file()]


def _say_who_compiles() -> None:
    print("waiting for another process that compiles layouts", file=sys.stderr)


def _batches(requests: Iterable[Request], jobs: int) -> list[list[Request]]:
    """Shares the requests out among programs that take about the same time to compile, at most
    `jobs` for each folder of headers. The shapes of a family have parts in common, which C++
    derives once in a program; a family is only split where jobs would be idle."""
    families: dict[tuple[object, ...], dict[tuple[object, ...], list[Request]]] = {}
    for request in requests:
        shapes = families.setdefault((request.include, request.adapter()), {})
        shapes.setdefault(request.shape(), []).append(request)

    def seconds(part: Sequence[list[Request]]) -> float:
        row = part[0][0].row
        return FAMILIES[row.arch, row.direction].seconds * len(part)

    parts = [list(shapes.values()) for shapes in families.values()]
    while len(parts) < jobs and any(len(part) > 1 for part in parts):
        parts.sort(key=lambda part: seconds(part) if len(part) > 1 else 0.0)
        longest = parts.pop()
        parts += [longest[: len(longest) // 2], longest[len(longest) // 2 :]]

    batches: dict[tuple[Path | None, int], list[Request]] = {}
    load: dict[tuple[Path | None, int], float] = {}
    for part in sorted(parts, key=seconds, reverse=True):
        keys = [(part[0][0].include, job) for job in range(jobs)]
        least = min(keys, key=lambda key: load.get(key, 0.0))
        load[least] = load.get(least, 0.0) + seconds(part)
        batches.setdefault(least, []).extend(itertools.chain(*part))
    return list(batches.values())
