"""A build of this package and the process that it runs in."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..contenders.base import CannotRun
from . import child

PACKAGE = "cute_attention"
KERNEL_PATH = "CUTE_ATTENTION_KERNEL_PATH"  # the folders with kernel libraries


class BuildProcess:
    """The process of a build.

    Args:
        label: what the build is called in tables.
        folder: where the build is. Either the package is in it, as `pip install --target` puts it
            there, or kernel libraries are: then the build is this package with these kernels.

    Raises:
        ValueError: the folder has neither; or the process does not start, or imports another
            package.
    """

    def __init__(self, label: str, folder: Path) -> None:
        self.label = label
        self.folder = folder.resolve()
        environment = dict(os.environ)
        is_package = (self.folder / PACKAGE / "__init__.py").is_file()
        if is_package:
            environment.pop(KERNEL_PATH, None)  # it has kernels for this package
        elif any(self.folder.glob("libcute_attention_*.so")):
            environment[KERNEL_PATH] = str(self.folder)
        else:
            raise ValueError(
                f"--build {label}={folder}: expected a folder with the package {PACKAGE}, or with "
                "kernel libraries (libcute_attention_*.so)"
            )
        ours, theirs = socket.socketpair()
        home = str(self.folder) if is_package else ""
        command = [sys.executable, child.__file__, home, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._connection = Connection(ours.detach())
        try:
            imported = Path(self._receive())
        except CannotRun as error:
            raise ValueError(f"--build {label}={folder}: {error}") from None
        if is_package and self.folder not in imported.parents:
            self.close()
            raise ValueError(f"--build {label}={folder}: its process imported {imported}")

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            raise CannotRun(f"the process of {self.label} ended with exit code {code}") from None

    def ask(self, method: str, *arguments: object) -> Any:
        """What a method of `child.Child` returns.

        Raises:
            CannotRun: the method raised an error, or the process has ended.
        """
        with contextlib.suppress(OSError):  # if it has ended, the answer says so
            self._connection.send((method, arguments))
        value, reason = self._receive()
        if reason:
            raise CannotRun(reason)
        return value

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.wait()


@contextlib.contextmanager
def running(builds: Iterable[tuple[str, Path]]) -> Iterator[list[BuildProcess]]:
    """The processes of builds, given as labels and folders, until this is left."""
    with contextlib.ExitStack() as stack:
        processes = []
        for label, folder in builds:
            processes.append(BuildProcess(label, folder))
            stack.callback(processes[-1].close)
        yield processes
