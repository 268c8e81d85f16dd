"""What the compiler made of a library: the bytes that its kernels keep in memory for want of
registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from . import toolchain

_USED = re.compile(r"STACK:(\d+).*?LOCAL:(\d+)")


def _cuobjdump() -> str | None:
    """The program that reads libraries: of the PATH, beside nvcc, or from PyPI."""
    if found := shutil.which("cuobjdump"):
        return found
    spec = find_spec("nvidia")
    packages = spec.submodule_search_locations if spec else None
    folders = [Path(toolchain.find().nvcc).resolve().parent]
    folders += [Path(folder) / "cu13" / "bin" for folder in packages or ()]
    return next((str(f / "cuobjdump") for f in folders if (f / "cuobjdump").is_file()), None)


def spilled_bytes(library: Path) -> int | None:
    """The most bytes that a thread of any of the kernels in a library keeps in local memory; None
    where nothing on this machine tells.

    Raises:
        BuildError: there is no compiler.
    """
    program = _cuobjdump()
    if program is None:
        return None
    command = [program, "--dump-resource-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found = [int(stack) + int(local) for stack, local in _USED.findall(done.stdout)]
    return max(found) if done.returncode == 0 and found else None
