"""Locks between processes, one file each: of all that do the same work, one does it and the others
wait."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that have none


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a file, which is made where it is not there and removed afterwards. The
    operating system gives it back when the process ends, however it ends. On a file system without
    locks nobody waits: what several processes do then must be right if they all do it.

    Args:
        path: of the lock, in a folder that exists.
        waiting: called before waiting for another process or thread.

    Raises:
        OSError: the file cannot be made or locked.
    """
    descriptor = _lock(path, waiting)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # whoever waits for this file locks a new one then
        os.close(descriptor)


def _lock(path: Path, waiting: Callable[[], None]) -> int:
    has_waited = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_waited:
                    has_waited = True
                    waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_same_file(path, descriptor):
                return descriptor
        except OSError as error:
            if error.errno in _NO_LOCKS:  # then nobody waits
                return descriptor
            os.close(descriptor)
            raise
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Whether a process holds this lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
