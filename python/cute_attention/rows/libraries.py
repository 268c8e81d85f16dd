"""Kernel libraries that are loaded while the process runs."""

from __future__ import annotations

import os

from ..errors import BuildError
from ..native import core
from ..native.core import Kernel


def load_library(path: str | os.PathLike[str], on_request: bool = False) -> list[Kernel]:
    """Load a kernel library now. At the first call the package loads those that it finds; this one
    may come later, and needs no folder in CUTE_ATTENTION_KERNEL_PATH.

    From now on its kernels take part in every choice, also for calls that were made before, and
    `kernels()` and `explain` list them. A compiled function keeps what it has chosen. Libraries are
    never unloaded: a file that is loaded already stays as it was loaded first.

    Args:
        path: the file, of this package's version.
        on_request: its kernels serve only calls that ask for them, by `rows.use` or by the argument
            `kernel`.

    Returns:
        The kernels that this call has added.

    Raises:
        BuildError: there is no core to load it, it is no kernel library of this ABI and version, it
            has a kernel whose name is taken, or the file has changed since it was loaded.

    Example:
        >>> from cute_attention import rows
        >>> try:
        ...     rows.load_library("no/such/file.so")
        ... except rows.BuildError as error:
        ...     print("BuildError")
        BuildError
    """
    try:
        before = {kernel.name for kernel in core.kernels()}
        core.load_library(path, on_request)
    except (OSError, RuntimeError) as error:
        raise BuildError(f"load_library: {error}") from error
    return [kernel for kernel in core.kernels() if kernel.name not in before]
