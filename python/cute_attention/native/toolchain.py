"""What compiles a row: nvcc and the headers of CUTLASS, of this machine or from PyPI."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import BuildError

CUTLASS = "4.2.0"  # as in third_party/cutlass.cmake
_NVCC_READS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")  # from the environment
_NVCC_HINT = (
    'nvcc was not found. Get it with\n  pip install "cuda-toolkit[nvcc,cudart,cccl,crt,nvvm]==13.*"'
    "\nor set CUDA_HOME to an installed toolkit, or CUDACXX to its nvcc."
)
_CUTLASS_HINT = (
    f"Get them with\n  pip install --no-deps nvidia-cutlass=={CUTLASS}.0\n"
    f"or set CUTLASS_DIR to a checkout of CUTLASS {CUTLASS}."
)


@dataclass(frozen=True)
class Toolchain:
    """A compiler with all that is not ours."""

    nvcc: str
    release: str  # "13.0.88"
    identity: str  # of compiler and headers: another one builds other libraries
    flags: tuple[str, ...]  # where headers and libraries are

    @property
    def name(self) -> str:
        """In a word."""
        return f"nvcc {self.release}"


def _package_folder(package: str) -> Path | None:
    spec = find_spec(package)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _nvcc_candidates() -> Iterator[str | None]:
    """In the order of cmake/architectures.cmake."""
    yield os.environ.get("CUDACXX")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            yield f"{folder}/bin/nvcc"
    yield "nvcc"
    yield "/usr/local/cuda/bin/nvcc"
    if nvidia := _package_folder("nvidia"):
        yield f"{nvidia}/cu13/bin/nvcc"


def program(name: str) -> str | None:
    """A program of the CUDA toolkit, such as cuobjdump: beside an nvcc, or on the PATH."""
    folders = [str(Path(path).parent) for path in _nvcc_candidates() if path and "/" in path]
    return shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def _find_nvcc() -> str:
    for candidate in _nvcc_candidates():
        if candidate and (found := shutil.which(candidate)):
            return found
    raise BuildError(_NVCC_HINT)


def _find_cutlass() -> Path:
    package = _package_folder("cutlass_library")
    folder = os.environ.get("CUTLASS_DIR") or (package and package / "source")
    if not folder or not (Path(folder) / "include" / "cute").is_dir():
        raise BuildError(f"the CuTe headers were not found. {_CUTLASS_HINT}")
    include = Path(folder) / "include"
    text = (include / "cutlass" / "version.h").read_text()
    version = ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) +(\d+)", text))
    if version != CUTLASS:
        raise BuildError(
            f"{include} holds CUTLASS {version}; the kernels are written for {CUTLASS}. "
            f"{_CUTLASS_HINT}"
        )
    return include


def hash_of_folder(folder: Path) -> str:
    """Of the names and the content of all files."""
    state = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        state.update(f"{file.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return state.hexdigest()


def _said(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    return result.stdout


@functools.cache
def chips_here() -> tuple[int, ...]:
    """The compute capabilities (major * 10 + minor) of this machine's GPUs from 8.0 on, or 80 where
    there is none. Asks the driver's program, so that CUDA is not initialised in this process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (80,)
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    found = {int(major + minor) for major, minor in re.findall(r"(\d+)\.(\d)", output)}
    return tuple(sorted(chip for chip in found if chip >= 80)) or (80,)


def find() -> Toolchain:
    """The compiler and the headers that builds of this process use.

    Raises:
        BuildError: there is none; the message says how to get it.
    """
    more = "".join(f"{name}={os.environ.get(name)}\n" for name in _NVCC_READS)
    return _known(_find_nvcc(), _find_cutlass(), more)


@functools.cache
def _known(nvcc: str, cutlass: Path, more: str) -> Toolchain:
    version = _said([nvcc, "--version"])
    release = re.search(r"V(\d[\d.]*)", version)
    # The compiler of the host's part, which nvcc takes from the PATH.
    host = shutil.which("g++")
    identity = (
        version + more + (_said([host, "--version"]) if host else "") + hash_of_folder(cutlass)
    )
    # The nvcc from PyPI does not know where the package of the CUDA runtime has its libraries.
    prefix = Path(nvcc).parent.parent
    libraries = [prefix / name for name in ("lib64", "lib")]
    found = [folder for folder in libraries if (folder / "libcudart_static.a").is_file()]
    return Toolchain(
        nvcc,
        release[1] if release else "of unknown version",
        identity,
        ("-isystem", str(cutlass), *(f"-L{folder}" for folder in found)),
    )
