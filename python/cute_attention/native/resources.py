"""What the compiler made of a library: the bytes that its kernels keep in memory for want of
registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from . import toolchain

_USED = re.compile(r"STACK:(\d+).*?LOCAL:(\d+)")


def spilled_bytes(library: Path) -> int | None:
    """The most bytes that a thread of any of the kernels in a library keeps in local memory; None
    where nothing on this machine tells."""
    program = toolchain.program("cuobjdump")
    if program is None:
        return None
    command = [program, "--dump-resource-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found = [int(stack) + int(local) for stack, local in _USED.findall(done.stdout)]
    return max(found) if done.returncode == 0 and found else None
