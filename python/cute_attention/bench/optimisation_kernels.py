"""What is known of the kernels of `bench steps` without a GPU, kept in the folder with them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from ..native import toolchain

FIGURES = "figures.json"  # in the folder: what is known of its kernels without a GPU
# In mangled names: kernels of rows, and those that read keys in caches, which no step measures.
_OF_A_ROW = "4rows"
_OF_CACHES = ("CachedKeys", "KeyPlaceE1")
_FUNCTION = re.compile(r"Function (\w+):\s*\n(.*)")
_RESOURCES = re.compile(r"\b([A-Z]+):(\d+)")

Figures = dict[str, float]


def machine_code(library: Path) -> Figures:
    """What ptxas gave a thread of the row's kernel for keys in tensors: its registers, and the
    bytes that it spills. Nothing where the toolkit's cuobjdump is not found."""
    program = toolchain.program("cuobjdump")
    if program is None:
        return {}
    command = [program, "--dump-resource-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for function, resources in _FUNCTION.findall(done.stdout):
        if _OF_A_ROW in function and not any(word in function for word in _OF_CACHES):
            used = {name: float(number) for name, number in _RESOURCES.findall(resources)}
            spilled = used.get("STACK", 0.0) + used.get("LOCAL", 0.0)
            return {"registers": used["REG"], "spilled_bytes": spilled}
    return {}


def read_figures(folder: Path) -> dict[str, Figures]:
    """What is kept in a folder about its kernels, by the names of their rows."""
    file = folder / FIGURES
    return json.loads(file.read_text()) if file.is_file() else {}


def write_figures(folder: Path, figures: dict[str, Figures]) -> None:
    (folder / FIGURES).write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
