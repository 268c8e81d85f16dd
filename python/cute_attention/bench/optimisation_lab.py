"""What the layout lab predicts of the steps of `bench steps`, and what Nsight Compute counts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import attention
from ..layouts import counters
from ..layouts.errors import LayoutError
from ..native.core import Kernel
from . import kernel_folder
from .optimisation_kernels import Figures
from .optimisations import HEAD_DIM, Step

# The call whose instructions are counted. The tiles of every step divide it.
HEADS, QUERIES, KEYS = 2, 512, 1024
# Figures, and what layouts/counters.py calls the counters.
_COUNTED = {
    "counted_ldmatrix": "ldmatrix",
    "counted_conflicts": "ldmatrix conflicts",
    "counted_instructions": "instructions",
}


def predicted(steps: Sequence[Step]) -> tuple[dict[str, Figures], str]:
    """The counters of the call in each step, by the names of the rows; and why there are none."""
    try:
        from ..layouts import export, model, multiply, ncu
    except ModuleNotFoundError as error:
        return {}, f'{error}: pip install "cute-attention[layouts]" adds it'
    call = ncu.Call(HEADS, QUERIES, KEYS)
    try:
        kernels = model.kernels([export.Request(step.row.columns) for step in steps])
    except LayoutError as error:
        return {}, str(error)
    found: dict[str, Figures] = {}
    for kernel in kernels:
        counts = ncu.predicted(kernel, call)
        tiles_m, tiles_n = call.tiles(kernel)
        mma = sum(multiply.mma_count(product) for product in kernel.products)
        found[kernel.row.name] = {
            "shared_memory": kernel.plan["bytes"],
            "mma": HEADS * tiles_m * tiles_n * mma,
            "ldmatrix": counts["ldmatrix"],
            "conflicts": counts["ldmatrix conflicts"],
        }
    return found, ""


def draw(steps: Sequence[Step], folder: Path) -> list[Path]:
    """Draws K in shared memory, and the banks that ldmatrix reads it from, of each step whose K
    lies otherwise than in the step before. Returns the PNG files."""
    from ..layouts import export, model
    from ..layouts.grid import save
    from ..layouts.pictures import sketches

    files = []
    before = None
    for kernel in model.kernels([export.Request(step.row.columns) for step in steps]):
        tile = kernel.tiles()["k"]
        looks = tile.notation, tile.address.shape
        if looks != before:
            for sketch in sketches(kernel):
                if sketch.name == "banks_k_operand_S" or sketch.name.startswith("smem_k"):
                    made = sketch.draw(", ".join(sketch.subjects))
                    files.append(save(made, folder, f"{kernel.file_name}_{sketch.name}")[1])
        before = looks
    return files


def counted(
    kernels: dict[str, Kernel], libraries: Sequence[Path]
) -> tuple[dict[str, Figures], str]:
    """The same counters and all instructions, as Nsight Compute counts them on this GPU, by the
    names of the rows; and why there are none, or not of all. `kernels` are those of the rows,
    `libraries` their files."""
    names = [kernel.name for kernel in kernels.values()]
    try:
        words = counters.command(
            names, counters.find_ncu(), module=__name__, arguments=[*map(str, libraries)]
        )
        measured = counters.parse(counters.run(words), names)
    except LayoutError as error:
        return {}, str(error)
    found = {row: _figures(measured.get(kernel.name, {})) for row, kernel in kernels.items()}
    lacking = [row for row, figures in found.items() if len(figures) < len(_COUNTED) + 1]
    missing = f"Nsight Compute has not told all counters of {', '.join(lacking)}" if lacking else ""
    return {row: figures for row, figures in found.items() if figures}, missing


def _figures(counts: dict[str, float]) -> Figures:
    found = {ours: counts[theirs] for ours, theirs in _COUNTED.items() if theirs in counts}
    if "mma" in counts:  # WGMMAs among them, once for each of the 4 warps of a warpgroup
        found["counted_mma"] = counts["mma"] - 0.75 * counts.get("wgmma", 0.0)
    return found


def main(libraries: Sequence[str]) -> None:
    """Runs the call once with the kernel of each library: what Nsight Compute looks at."""
    q = torch.randn(1, QUERIES, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, KEYS, HEADS, HEAD_DIM, device="cuda", dtype=q.dtype).unbind()
    for library in libraries:
        attention(q, k, v, kernel=kernel_folder.load_file(Path(library)))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
