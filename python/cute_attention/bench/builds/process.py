"""The process that a build of this package runs in."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..contenders.base import CannotRun
from .build import Build


class BuildProcess:
    """The process of a build.

    Args:
        build: what runs in it.
        device: where calls are made.
        seed: with which inputs are drawn.

    Raises:
        ValueError: it does not start.
    """

    def __init__(self, build: Build, device: torch.device, seed: int) -> None:
        self.build = build
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            build.command(device, seed, "serve", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            env=build.environment,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        try:
            self._receive()  # that it has started
        except CannotRun as error:
            raise ValueError(f"--build {build.in_build}: {error}") from None

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            label = self.build.label
            raise CannotRun(f"the process of {label} ended with exit code {code}") from None

    def ask(self, method: str, *arguments: object) -> Any:
        """What a method of `child.Server` returns.

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
def running(
    builds: Iterable[Build], device: torch.device, seed: int
) -> Iterator[list[BuildProcess]]:
    """The processes of builds, until this is left."""
    with contextlib.ExitStack() as stack:
        processes = []
        for build in builds:
            processes.append(BuildProcess(build, device, seed))
            stack.callback(processes[-1].close)
        yield processes
