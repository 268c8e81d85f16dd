"""What is known of the kernels of `bench steps` without a GPU, kept in the folder with them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from ..native import toolchain

FIGURES = "figures.json"  # in the folder: what is known of its kernels without a GPU
_RESOURCES = re.compile(r"\b([A-Z]+):(\d+)")

Figures = dict[str, float]


def machine_code(library: Path) -> Figures:
    """What ptxas gave a thread of a library's kernel: its registers, and the bytes that it spills.
    Nothing where the toolkit's cuobjdump is not found."""
    program = toolchain.program("cuobjdump")
    if program is None:
        return {}
    command = [program, "--dump-resource-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: Figures = {}
    for line in done.stdout.splitlines():
        used = {name: float(number) for name, number in _RESOURCES.findall(line)}
        if "REG" in used:
            found["registers"] = max(used["REG"], found.get("registers", 0.0))
            spilled = used.get("STACK", 0.0) + used.get("LOCAL", 0.0)
            found["spilled_bytes"] = max(spilled, found.get("spilled_bytes", 0.0))
    return found


def read_figures(folder: Path) -> dict[str, Figures]:
    """What is kept in a folder about its kernels, by the names of their rows."""
    file = folder / FIGURES
    return json.loads(file.read_text()) if file.is_file() else {}


def write_figures(folder: Path, figures: dict[str, Figures]) -> None:
    (folder / FIGURES).write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
