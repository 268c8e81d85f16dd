"""`diff ROW_A ROW_B`: what differs between two kernels, in numbers and side by side."""

from __future__ import annotations

from pathlib import Path

from cute_attention.layouts.checks import check
from cute_attention.layouts.grid import figure, save
from cute_attention.layouts.limits import occupancy, registers
from cute_attention.layouts.model import Kernel
from cute_attention.layouts.multiply import mma_count
from cute_attention.layouts.pictures import VECTOR, bank_legend, draw_tile
from cute_attention.layouts.trace import operand_copies, tile_copies


def metrics(kernel: Kernel) -> dict[str, str]:
    """The numbers that two kernels are compared by, each with its name."""
    found = {
        "tile (queries x keys)": " x ".join(map(str, kernel.tile)),
        "head dim (q and k, v)": f"{kernel.row.head_dim}, {kernel.row.head_dim_v}",
        "stages": "-" if kernel.part else str(kernel.row.stages),
        "warps": str(kernel.row.warps),
        "shared memory, bytes": str(kernel.plan["bytes"]),
        "CTAs on an SM": str(occupancy(kernel).ctas),
    }
    for buffer in kernel.plan["buffers"]:
        found[f"buffer {buffer['name']}, bytes"] = str(buffer["bytes"])
    for role in kernel.roles:
        if role["together"]:
            found[f"registers of a thread, {role['name']}"] = f"at least {registers(kernel, role)}"
    for tensor, tile in kernel.tiles().items():
        found[f"s{tensor.upper()}"] = tile.notation
    for copy in [*tile_copies(kernel), *operand_copies(kernel)]:
        count = copy.warps.shape[0] * copy.warps.shape[2]
        found[copy.name] = f"{count} {copy.instruction}"
    for product in kernel.products:
        found[product["formula"]] = f"{mma_count(product)} {product['instruction']}"
    results = check(kernel)
    found["bank conflicts of a tile"] = str(sum(result.conflicts for result in results))
    found["violations"] = str(sum(not result.ok for result in results))
    return found


def numbers(first: Kernel, second: Kernel) -> str:
    """A table with a line for each number that differs."""
    old, new = metrics(first), metrics(second)
    changed = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    if not changed:
        return f"{first.name} and {second.name}: the layouts are the same"
    lines = [("", first.name, second.name)]
    lines += [(key, old.get(key, "-"), new.get(key, "-")) for key in changed]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def picture(first: Kernel, second: Kernel, folder: Path) -> Path:
    """Draws the shared memory of each tile of both kernels, side by side; returns the PNG."""
    old, new = first.tiles(), second.tiles()
    both = [tensor for tensor in old if tensor in new]
    tensors = [tensor for tensor in both if old[tensor].layout != new[tensor].layout] or both
    pair = (first, second)
    columns = [max(k.shape(tensor)[1] for tensor in tensors) // VECTOR for k in pair]
    created = figure(0.45 * sum(columns) + 3.5, 4.2 * len(tensors) + 0.5)
    grid = created.subplots(len(tensors), 2, squeeze=False, width_ratios=columns)
    for line, tensor in zip(grid, tensors, strict=True):
        for axes, kernel in zip(line, pair, strict=True):
            tile = kernel.tiles()[tensor]
            draw_tile(axes, tile)
            shape = " x ".join(map(str, tile.address.shape))
            axes.set_title(f"{kernel.name}\n{tensor} ({shape})  {tile.notation}", fontsize=7)
        bank_legend(line[1])
    return save(created, folder, f"{first.file_name}_against_{second.file_name}")[1]
