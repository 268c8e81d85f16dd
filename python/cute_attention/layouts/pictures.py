"""Pictures of one kernel: its tiles in shared memory, its copies, banks, fragments and plan."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from cute_attention.layouts import hardware
from cute_attention.layouts.checks import bank_phases
from cute_attention.layouts.grid import (
    CELL,
    colour,
    distinct,
    draw_grid,
    figure,
    legend,
    shade,
    ticks,
)
from cute_attention.layouts.model import ELEMENT_BYTES, Kernel, SharedTile
from cute_attention.layouts.trace import (
    TileCopy,
    accumulator,
    accumulator_elements,
    operand_copies,
    tile_copies,
)

VECTOR = 8  # elements: 16 bytes, 4 banks
SHOWN_ROWS = 16  # rows shown of a tile in shared memory; a swizzle repeats after 8
COPY_ROWS = 32  # rows shown of a tile that threads copy
GROUPS = 8  # of banks, 4 in each: as many as a vector needs


@dataclass(frozen=True)
class Sketch:
    """A picture that is not drawn yet, and the parts of the kernel that it shows."""

    name: str  # of the file
    about: str  # the title, with {} for the subjects: "{} in shared memory"
    subjects: list[str]
    draw: Callable[[str], Figure]  # given the title

    @property
    def title(self) -> str:
        """The title, with all subjects."""
        return self.about.format(", ".join(dict.fromkeys(self.subjects)))


def sketches(kernel: Kernel) -> list[Sketch]:
    """Every picture of a kernel. Parts that look the same share one picture, as its subjects."""
    found: dict[Any, Sketch] = {}

    def add(key: Any, name: str, about: str, subject: str, draw: Callable[[str], Figure]) -> None:
        found.setdefault(key, Sketch(name, about, [], draw)).subjects.append(subject)

    add("plan", "plan", "{}", "Shared-memory plan", lambda _: plan(kernel))
    for tile in kernel.tiles().values():
        shared = functools.partial(shared_memory, kernel, tile)
        key: Any = ("smem", tile.notation, tile.address.shape)
        add(key, f"smem_{tile.tensor}", "{} in shared memory", tile.tensor, shared)
    for copy in tile_copies(kernel):
        assert copy.target is not None
        moved = functools.partial(threads, kernel, copy)
        key = ("copy", copy.instruction, copy.tile.address.shape, copy.target.tobytes())
        name = f"copy_{copy.tile.tensor}_{copy.kind}"
        add(key, name, "Threads: {}", copy.name, moved)
    for copy in [*tile_copies(kernel), *operand_copies(kernel)]:
        name = f"banks_{copy.tile.tensor}_{copy.kind}"
        if copy.kind == "operand":
            name += f"_{copy.key[0]}" + (f"_{copy.key[2]}" if copy.key[2] else "")
        used = functools.partial(banks, kernel, copy)
        key = ("banks", copy.instruction, copy.warps[0, :, 0].tobytes(), _conflicts(copy))
        add(key, name, "Banks: {}", copy.name, used)
    for product in kernel.products:
        held = functools.partial(fragments, kernel, product)
        key = ("product", *product["tile"][:2], accumulator(product).tobytes())
        add(key, f"product_{product['name']}", "{}", product["formula"], held)
    return list(found.values())


def _conflicts(copy: TileCopy) -> int:
    return int((bank_phases(copy) - 1).sum())


def _wrapped(text: str, width: float) -> str:
    """Text in lines that fit a figure so many inches wide, at 8 points."""
    return textwrap.fill(text, max(int(width * 13), 30))


def plan(kernel: Kernel) -> Figure:
    """The plan of shared memory: a line for each phase, with the buffers alive then as bars."""
    phases = kernel.plan["phases"]
    limit = hardware.CHIPS[kernel.row.arch].cta_shared_memory
    created = figure(10, 1.6 + 0.45 * len(phases))
    axes = created.subplots()
    for index, buffer in enumerate(kernel.plan["buffers"]):
        for phase in range(buffer["first"], buffer["last"] + 1):
            axes.barh(
                phase,
                buffer["bytes"] / 1024,
                left=buffer["offset"] / 1024,
                height=0.8,
                color=colour(index),
                edgecolor="white",
            )
            if buffer["bytes"] * 30 > kernel.plan["bytes"]:
                middle = (buffer["offset"] + buffer["bytes"] / 2) / 1024
                axes.text(middle, phase, buffer["name"], ha="center", va="center", fontsize=9)
    axes.axvline(kernel.plan["bytes"] / 1024, color="black", lw=1)
    axes.axvline(limit / 1024, color="#cc3311", lw=1.5, ls="--")
    axes.set_xlim(0, limit / 1024 * 1.02)
    axes.set_yticks(range(len(phases)), phases)
    axes.invert_yaxis()
    axes.set_xlabel("KB from the start of the CTA's shared memory (dashed: the most it may have)")
    axes.set_title(f"{kernel.name}: {kernel.plan['bytes']} of {limit} bytes", fontsize=10)
    legend(
        axes,
        [
            (colour(i), f"{buffer['name']}  {buffer['offset']} + {buffer['bytes']}")
            for i, buffer in enumerate(kernel.plan["buffers"])
        ],
    )
    return created


def _vectors(tile: SharedTile) -> tuple[int, int]:
    rows, cols = tile.address.shape
    return min(rows, SHOWN_ROWS), cols // VECTOR


def _vector_labels(cols: int) -> list[str]:
    return [f"{VECTOR * col}" for col in range(cols)]


def draw_tile(axes: Axes, tile: SharedTile, first: int = 0) -> None:
    """Draws the rows of a tile from `first` on, with the address of each 16-byte vector."""
    rows, cols = _vectors(tile)
    address = tile.address[first : first + rows, ::VECTOR] * ELEMENT_BYTES
    draw_grid(
        axes,
        (rows, cols),
        lambda row, col: colour(int(address[row, col]) // 16 % GROUPS),
        lambda row, col: str(address[row, col]),
    )
    ticks(axes, [str(first + row) for row in range(rows)], _vector_labels(cols))
    axes.set_title("the tile: byte address of each 16-byte vector, coloured by banks", fontsize=8)
    axes.set_xlabel("column (element)", fontsize=7)
    axes.set_ylabel("row", fontsize=7)


def bank_legend(axes: Axes) -> None:
    """Draws the legend of the colours that draw_tile uses."""
    legend(axes, [(colour(i), f"banks {4 * i}-{4 * i + 3}") for i in range(GROUPS)])


def shared_memory(kernel: Kernel, tile: SharedTile, subjects: str) -> Figure:
    """Left: the tile, with the address of each 16-byte vector. Right: the memory, with the row and
    column of the vector at each address."""
    rows, cols = _vectors(tile)
    address = tile.address[:rows, ::VECTOR] * ELEMENT_BYTES
    lines = np.unique(address // 128)[:SHOWN_ROWS]
    width = CELL * 1.35
    created = figure(width * (cols + GROUPS) + 4.2, CELL * 0.72 * max(rows, len(lines)) + 1.3)
    left, right = created.subplots(1, 2, width_ratios=[cols, GROUPS + 1])
    draw_tile(left, tile)
    holder = {int(address[r, c]): (r, c) for r in range(rows) for c in range(cols)}

    def held(line: int, slot: int) -> tuple[int, int] | None:
        return holder.get(int(lines[line]) * 128 + 16 * slot)

    def fill(line: int, slot: int) -> str | tuple[float, float, float]:
        found = held(line, slot)
        return "#eeeeee" if found is None else shade(found[0] % 8, 8)

    def text(line: int, slot: int) -> str:
        found = held(line, slot)
        return "" if found is None else f"{found[0]},{VECTOR * found[1]}"

    draw_grid(right, (len(lines), GROUPS), fill, text)
    ticks(
        right,
        [str(int(line) * 128) for line in lines],
        [f"{4 * slot}-{4 * slot + 3}" for slot in range(GROUPS)],
    )
    right.set_title("shared memory: row,column it holds, coloured by row % 8", fontsize=8)
    right.set_xlabel("banks", fontsize=7)
    right.set_ylabel("byte address", fontsize=7)
    bank_legend(right)
    shape = " x ".join(map(str, tile.address.shape))
    title = f"{kernel.name}: {subjects} ({shape})  {tile.notation}"
    created.suptitle(_wrapped(title, created.get_figwidth()), fontsize=9)
    return created


def threads(kernel: Kernel, copy: TileCopy, subjects: str) -> Figure:
    """Which thread moves each vector of the tile, in which instruction."""
    assert copy.target is not None
    tile_rows, tile_cols = copy.tile.address.shape
    rows, cols = min(tile_rows, COPY_ROWS), tile_cols // copy.values
    total = copy.target.shape[1]
    owner = np.full((tile_rows, tile_cols), -1)
    step = np.full((tile_rows, tile_cols), -1)
    for thread in range(copy.target.shape[0]):
        for instruction in range(total):
            first = copy.target[thread, instruction, 0]
            owner[first % tile_rows, first // tile_rows] = thread
            step[first % tile_rows, first // tile_rows] = instruction
    owner, step = owner[:rows, :: copy.values], step[:rows, :: copy.values]
    wide = min(cols, 32)
    shown = sorted({int(i) for i in step[:, :wide].reshape(-1)})
    order = {instruction: place for place, instruction in enumerate(shown)}
    created = figure(CELL * 1.1 * wide + 2.6, CELL * 0.72 * rows + 1.2)
    axes = created.subplots()
    draw_grid(
        axes,
        (rows, wide),
        lambda row, col: distinct(order[int(step[row, col])]),
        lambda row, col: str(owner[row, col]),
    )
    ticks(
        axes,
        [str(row) for row in range(rows)],
        [str(copy.values * col) for col in range(wide)],
    )
    axes.set_xlabel("column (element)", fontsize=7)
    axes.set_ylabel("row", fontsize=7)
    legend(axes, [(distinct(order[i]), f"instruction {i}") for i in shown[:24]])
    size = copy.values * ELEMENT_BYTES
    does = "gives the address of" if hardware.moves_matrices(copy.instruction) else "moves"
    title = (
        f"{subjects}: thread that {does} each {size}-byte vector ({copy.instruction}), "
        f"{total} instructions a thread"
    )
    created.suptitle(f"{kernel.name}\n{_wrapped(title, created.get_figwidth())}", fontsize=8)
    return created


def banks(kernel: Kernel, copy: TileCopy, subjects: str) -> Figure:
    """The first instruction of warp 0: for each phase and pass, which lane uses which bank."""
    size = copy.values * ELEMENT_BYTES
    groups = hardware.phases(copy.instruction, size)
    address = copy.warps[0, :, 0, 0] * ELEMENT_BYTES
    lines: list[tuple[str, dict[int, int]]] = []
    for phase, lanes in enumerate(groups):
        passes: list[dict[int, tuple[int, int]]] = []
        for lane in lanes:
            for word in range(int(address[lane]) // 4, (int(address[lane]) + max(size, 4)) // 4):
                for used in passes:
                    if used.get(word % 32, (word, lane))[0] == word:
                        used[word % 32] = (word, lane)
                        break
                else:
                    passes.append({word % 32: (word, lane)})
        for number, used in enumerate(passes):
            label = f"phase {phase}" + (f", pass {number + 1}" if len(passes) > 1 else "")
            lines.append((label, {bank: lane for bank, (_, lane) in used.items()}))
    created = figure(CELL * 32 + 1.8, CELL * 0.8 * len(lines) + 1.3)
    axes = created.subplots()
    draw_grid(
        axes,
        (len(lines), 32),
        lambda row, bank: shade(lines[row][1][bank], 32) if bank in lines[row][1] else "#eeeeee",
        lambda row, bank: str(lines[row][1].get(bank, "")),
        7.0,
    )
    ticks(axes, [label for label, _ in lines], [str(bank) for bank in range(32)])
    axes.set_xlabel("bank; in each cell the lane that uses it", fontsize=7)
    title = (
        f"{subjects}: the first {copy.instruction} of warp 0; "
        f"{_conflicts(copy)} conflicts in the whole tile"
    )
    created.suptitle(f"{kernel.name}\n{_wrapped(title, created.get_figwidth())}", fontsize=8)
    return created


def fragments(kernel: Kernel, product: dict[str, Any], subjects: str) -> Figure:
    """A corner of the accumulator with the thread and register of each element, and the whole tile
    with the warp of each part."""
    m, n, _ = product["tile"]
    elements = accumulator_elements(product)
    held = accumulator(product)
    owner = np.full(m * n, -1)
    register = np.full(m * n, -1)
    for thread in range(held.shape[0]):
        owner[held[thread]] = thread
        register[held[thread]] = np.arange(held.shape[1])
    owner, register = owner.reshape(n, m).T, register.reshape(n, m).T
    created = figure(12.5, 6.2)
    left, right = created.subplots(1, 2, width_ratios=[3, 2])
    rows, cols = 16, min(n, 16)
    draw_grid(
        left,
        (rows, cols),
        lambda row, col: shade(int(owner[row, col]) % 32, 32),
        lambda row, col: f"T{owner[row, col]}\nr{register[row, col]}",
        6.5,
    )
    ticks(left, [str(row) for row in range(rows)], [str(col) for col in range(cols)])
    left.set_xlabel("column of the accumulator", fontsize=7)
    left.set_ylabel("row", fontsize=7)
    left.set_title("first 16 x 16 elements: thread and its register, coloured by lane", fontsize=8)
    by_warp = owner // 32
    right.imshow(
        np.array([[to_rgb(colour(int(w))) for w in line] for line in by_warp]),
        extent=(0, n, m, 0),
        interpolation="nearest",
        aspect="auto",
    )
    warps = sorted({int(w) for w in by_warp.reshape(-1)})
    legend(right, [(colour(w), f"warp {w}") for w in warps])
    right.set_xlabel("column", fontsize=7)
    right.set_ylabel("row", fontsize=7)
    right.tick_params(labelsize=6)
    right.set_title(f"the whole {m} x {n} accumulator by warp", fontsize=8)
    created.suptitle(
        f"{kernel.name}: {subjects}, {product['instruction']}, "
        f"{held.shape[1]} registers a thread, "
        f"{elements.shape[2]} x {elements.shape[3]} instructions of a warp a k block",
        fontsize=9,
    )
    return created
