"""A row of a kernel table, compiled into a kernel library of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError
from . import core, instance, kernel_cache, toolchain
from .rows import TableRow
from .toolchain import Toolchain

_KEY = 24  # hexadecimal digits
_TICK = 1.0  # seconds between two looks at the compiler
_MOST_LINES = 60  # of the compiler's output in an error
_LIBRARY = "library.so"


@dataclass(frozen=True)
class Source:
    """What a library is built from, beside the compiler."""

    row: TableRow
    chips: tuple[int, ...]  # compute capabilities; sm90 rows have their own
    include: Path | None = None  # headers that are found before the package's own
    launch: Path | None = None  # a file in place of the header of the launch class


def key_of(source: Source, tools: Toolchain) -> str:
    """The hash of all that decides what the compiler makes of a row."""
    folder = instance.sources()
    state = hashlib.sha256()
    for part in (
        repr(source.row),
        " ".join(instance.compile_flags(source.row, source.chips)),
        tools.identity,
        _version(),
        toolchain.hash_of_folder(folder / "include"),
        *((folder / "src" / name).read_text() for name in instance.SOURCES),
        toolchain.hash_of_folder(source.include) if source.include else "",
        source.launch.read_text() if source.launch else "",
    ):
        state.update(hashlib.sha256(part.encode()).digest())
    return state.hexdigest()[:_KEY]


@functools.cache
def _version() -> str:
    """The version of the core, for which libraries are built.

    Raises:
        BuildError: there is no core, or it is not that of these headers.
    """
    if not core.available():
        raise BuildError(
            "the package was installed without its core library, which loads what is built: "
            "install cute-attention anew"
        )
    built = core.build_info()
    header = instance.sources() / "include" / "cute_attention" / "kernel_library.h"
    match = re.search(r"kKernelLibraryAbi = (\d+);", header.read_text())
    abi = int(match[1]) if match else None
    if abi != built["kernel_abi"]:
        raise BuildError(
            f"{header} has kernel ABI {abi}, and the installed core {built['kernel_abi']}: it "
            "would refuse what is built. Install the package anew from these sources"
        )
    return str(built["version"])


def named_after(source: Source, key: str) -> Source:
    """The source with a name that no row of another content has."""
    row = dataclasses.replace(source.row, name=f"{source.row.name}_{key[:8]}")
    return dataclasses.replace(source, row=row)


def build(source: Source, is_study: bool) -> tuple[str, Path | None]:
    """The name and the kernel library of a row, from the cache or compiled now; no library where
    this process has loaded the row.

    Args:
        source: the row and what is special about it.
        is_study: give the row a name of its own; a row that is in the tables keeps its name.

    Raises:
        BuildError: it cannot be compiled, or the cache cannot be used.
    """
    for path in (source.include, source.launch):
        if path is not None and not path.exists():
            raise BuildError(f"{path} does not exist")
    tools = toolchain.find()
    key = key_of(source, tools)
    if is_study:
        source = named_after(source, key)
    row = source.row
    if row.name in {kernel.name for kernel in core.kernels()}:  # its file may be gone by now
        return row.name, None

    def compile_in(folder: Path) -> Path:
        return _compile(source, tools, folder)

    def waiting() -> None:
        say(f"waiting for another process that builds {row.name}")

    path = kernel_cache.path_of(row.name, key)
    return row.name, kernel_cache.obtain(path, compile_in, waiting)


def command(source: Source, tools: Toolchain, folder: Path) -> list[str]:
    """Compiles and links the files of `write_files` in a folder."""
    ours = instance.sources()
    own = (source.include,) if source.include else ()
    return [
        tools.nvcc,
        *instance.compile_flags(source.row, source.chips),
        *(f"-I{path}" for path in (*own, ours / "include", ours / "src")),
        *tools.flags,
        f'-DCUTE_ATTENTION_VERSION="{_version()}"',
        *instance.LINK,
        *(str(folder / name) for name in ("row.cu", "table.cpp")),
        *(str(ours / "src" / name) for name in instance.SOURCES if name.endswith(".cu")),
        "-o",
        str(folder / _LIBRARY),
    ]


def write_files(source: Source, tools: Toolchain, folder: Path) -> None:
    """The generated files of a library: the kernels and the table of one row."""
    launch = str(source.launch.resolve()) if source.launch else instance.launch_header(source.row)
    (folder / "row.cu").write_text(instance.instance_text(source.row, launch))
    row = source.row
    built_with = " ".join(instance.targets(row.arch, row.direction, source.chips))
    (folder / "table.cpp").write_text(instance.table_text(row, f"{tools.name}, {built_with}"))


def _compile(source: Source, tools: Toolchain, folder: Path) -> Path:
    """The library of a row, in a folder that is removed later."""
    row = source.row
    start = time.monotonic()
    write_files(source, tools, folder)
    words = command(source, tools, folder)
    say(f"building {row.name} with {tools.name} (about a minute)")
    status, output = _run(words, row.name, start)
    if status != 0:
        raise BuildError(_failure(row.name, status, output, words))
    library = folder / _LIBRARY
    if not library.is_file():
        raise BuildError(f"{row.name}: {tools.nvcc} reported success, but wrote no library")
    say(f"built {row.name} in {time.monotonic() - start:.0f} s")
    return library


def _failure(name: str, status: int, output: str, words: list[str]) -> str:
    lines = output.strip().splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    said = "\n".join(lines[first : first + _MOST_LINES])
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}, as happens where memory runs out"
    else:
        how = f"ended with exit code {status}"
    return f"{name}: nvcc {how}\n{said}\nThe command was:\n{shlex.join(words)}"


def _run(words: list[str], name: str, start: float) -> tuple[int, str]:
    """Runs the compiler and shows that time passes. If this process ends or is interrupted, the
    compiler and all that it has started end too."""
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(f"{words[0]} does not run: {error}") from error
    try:
        with _ended_with_this_process(process.pid):
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(timeout=_TICK)
                    return process.returncode, output
                say(f"building {name}: {time.monotonic() - start:.0f} s", passing=True)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@contextlib.contextmanager
def _ended_with_this_process(group: int) -> Iterator[None]:
    """Inside, a process group is killed if this process ends, however it ends: a shell waits for
    the end of a pipe whose other end only this process has."""
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", f"read _; kill -KILL -{group}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def say(text: str, passing: bool = False) -> None:
    """Tells whoever waits; what is soon out of date, only where the line can be written over."""
    is_terminal = sys.stderr.isatty()
    if passing and not is_terminal:
        return
    begin, end = ("\r", "") if passing else ("\r\033[K" if is_terminal else "", "\n")
    print(f"{begin}cute_attention: {text}", end=end, file=sys.stderr, flush=True)
