"""The folder with the kernel libraries that were built from Python, and with the choices that were
measured among them: one file each, owned by the user, complete or not there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError
from . import file_lock

FOLDER = "CUTE_ATTENTION_CACHE"
SIZE = "CUTE_ATTENTION_CACHE_SIZE"
PLUG_IN = "libcute_attention_"  # what the names of libraries outside of the cache begin with
_DEFAULT_SIZE = 2 * 2**30
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ENTRY = re.compile(r"(\w+)-([0-9a-f]{24})\.so")
_UNFINISHED = "build-"  # folders of builds that run, or that ended without cleaning up
_CHOICE = "choice-"  # files that say which row was the fastest for a call


@dataclass(frozen=True)
class Entry:
    """A library in the cache."""

    path: Path
    row: str
    key: str
    bytes: int
    used: float  # when a process last loaded it, in seconds since 1970


def folder() -> Path:
    """Where built kernels are kept, whether or not it exists."""
    if named := os.environ.get(FOLDER):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cute-attention" / "kernels"


def size_limit() -> int:
    """How many bytes the cache may hold.

    Raises:
        BuildError: the environment says something that is no number.
    """
    text = os.environ.get(SIZE)
    if not text:
        return _DEFAULT_SIZE
    if not text.isascii() or not text.isdigit():
        raise BuildError(f"{SIZE} is {text!r}, expected a number of bytes")
    return int(text)


def path_of(row: str, key: str) -> Path:
    """The file of a library; `key` is the hash of all that it is built from."""
    return folder() / f"{row}-{key}.so"


def choice_path(key: str) -> Path:
    """The file that says which row was the fastest; `key` is the hash of all that decides it."""
    return folder() / f"{_CHOICE}{key}.json"


def copy_of(row: str, target: Path) -> Path:
    """A copy of a row's library, which is in the cache, in the folder `target`: a plug-in."""
    (path,) = folder().glob(f"{row}-*.so")
    target.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(path, target / f"{PLUG_IN}{row}.so"))


def find(path: Path) -> bool:
    """Whether a library is in the cache, in a state in which it may be loaded.

    Raises:
        BuildError: somebody else could have written the file.
    """
    if not path.parent.is_dir():
        return False
    _refuse_if_others_write(path.parent)
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(info.st_mode):
        raise BuildError(f"{path} is no file: remove it")
    _refuse_if_others_write(path)
    with contextlib.suppress(OSError):  # a cache that can only be read does not remember
        os.utime(path, ns=(time.time_ns(), info.st_mtime_ns))
    return True


def _refuse_if_others_write(path: Path) -> None:
    """Loading a library runs its code, so nobody else may have written it."""
    info = os.stat(path)
    if info.st_uid not in (os.geteuid(), 0):
        raise BuildError(
            f"{path} belongs to user {info.st_uid}, and this process runs as user {os.geteuid()}: "
            f"kernels that somebody else may have written are not loaded. Set {FOLDER} to a folder "
            "of your own"
        )
    if info.st_mode & _WRITABLE_BY_OTHERS:
        raise BuildError(
            f"{path} can be written by other users: kernels that somebody else may have written "
            f"are not loaded. Run `chmod -R go-w {path}` if you trust what is in it, or set "
            f"{FOLDER} to another folder"
        )


def obtain(path: Path, build: Callable[[Path], Path], waiting: Callable[[], None]) -> Path:
    """A library from the cache, which is built where it is not there yet.

    Of all processes and threads that ask at the same time, one builds and the others wait. If that
    one fails or is killed, the next one tries.

    Args:
        path: of `path_of`.
        build: makes the library in a folder that it is given, which is removed afterwards, and
            returns the file.
        waiting: called before waiting for another process or thread.

    Raises:
        BuildError: the cache cannot be used; and what `build` raises, which leaves nothing.
    """
    if find(path):
        return path
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        _refuse_if_others_write(path.parent)
        with file_lock.locked(path.with_suffix(".lock"), waiting):
            if not find(path):
                _build(path, build)
    except OSError as error:
        raise BuildError(
            f"the cache folder {path.parent} has no {path.name}, and building it there failed: "
            f"{error}. Set {FOLDER} to a folder that can be written"
        ) from error
    return path


def _build(path: Path, build: Callable[[Path], Path]) -> None:
    """Builds a library whose lock this process holds."""
    prefix = f"{_UNFINISHED}{path.stem}-"
    for leftover in path.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as made_in:
        library = build(Path(made_in))
        library.chmod(0o600)
        with library.open("rb") as file:
            os.fsync(file.fileno())
        library.replace(path)
    _shrink(path)


def entries() -> list[Entry]:
    """The libraries in the cache, the one used last first."""
    found = []
    for path in folder().glob("*.so"):
        match = _ENTRY.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):
            info = path.lstat()
            if match:
                found.append(Entry(path, match[1], match[2], info.st_size, info.st_atime))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def _shrink(kept: Path) -> None:
    """Removes the libraries that were not used for longest, until the others fit. Processes that
    have loaded one keep it."""
    room = size_limit()
    for entry in sorted(entries(), key=lambda entry: entry.path != kept):
        room -= entry.bytes
        if room < 0 and entry.path != kept:
            entry.path.unlink(missing_ok=True)


def clear() -> list[Entry]:
    """Removes all libraries, the choices among them (`rows.autotune`), and what builds that were
    killed have left. Returns the libraries."""
    removed = entries()
    if folder().is_dir():
        _refuse_if_others_write(folder())
    for entry in removed:
        entry.path.unlink(missing_ok=True)
    for choice in folder().glob(f"{_CHOICE}*.json"):
        choice.unlink(missing_ok=True)
    for unfinished in folder().glob(f"{_UNFINISHED}*"):
        key = unfinished.name.removeprefix(_UNFINISHED).rpartition("-")[0]
        if not file_lock.is_held(folder() / f"{key}.lock"):
            shutil.rmtree(unfinished, ignore_errors=True)
    return removed
