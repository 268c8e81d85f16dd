"""The proofs. Each has a rule, says whether it holds, and gives a number; docs/layouts.md explains
the rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cute_attention.layouts import hardware
from cute_attention.layouts.handed import check_handed
from cute_attention.layouts.limits import check_limits
from cute_attention.layouts.model import ELEMENT_BYTES, Array, Kernel
from cute_attention.layouts.multiply import check_product
from cute_attention.layouts.numbers import check_numbers
from cute_attention.layouts.result import Result
from cute_attention.layouts.staged import check_staged
from cute_attention.layouts.trace import (
    TileCopy,
    Trace,
    at,
    box_elements,
    operand_copies,
    tile_copies,
    trace_of,
)


def check(kernel: Kernel) -> list[Result]:
    """Every proof about one kernel."""
    trace = trace_of(kernel)
    return [
        *_check_tiles(kernel),
        *_check_copies(kernel, trace),
        *_check_boxes(kernel),
        *check_numbers(kernel),
        *check_staged(kernel),
        *check_handed(kernel),
        *(check_product(trace, product) for product in kernel.products),
        *check_limits(kernel),
    ]


def _check_tiles(kernel: Kernel) -> Iterator[Result]:
    """The rule `layout`: each element of a tile has an address of its own, inside the buffer."""
    buffers = {buffer["name"]: buffer for buffer in kernel.plan["buffers"]}
    for tile in kernel.tiles().values():
        size = tile.address.size
        distinct = len(np.unique(tile.address))
        room = buffers[tile.tensor]["bytes"] // ELEMENT_BYTES
        inside = int((tile.address < room).sum())
        ok = distinct == size == inside
        number = f"{distinct} addresses, {inside} inside the buffer, for {size} elements"
        yield Result("layout", tile.tensor, ok, number)


def _check_copies(kernel: Kernel, trace: Trace) -> Iterator[Result]:
    for copy in tile_copies(kernel):
        yield _copied_once(kernel, trace, copy)
    for copy in [*tile_copies(kernel), *operand_copies(kernel)]:
        yield _vectors(kernel, copy)
        if copy.given is not None:
            yield _addresses(copy, copy.given)
        if copy.given_source is not None:
            yield _elements(copy, copy.given_source)
        yield banks(copy)
        if copy.kind in ("load", "store"):
            yield _sectors(kernel, copy)


def _copied_once(kernel: Kernel, trace: Trace, copy: TileCopy) -> Result:
    """The rule `copied once`: every element of the tile moves exactly once, to or from the address
    that the layout gives it."""
    tile = copy.tile
    rows, cols = tile.address.shape
    assert copy.target is not None
    if copy.kind == "load":
        assert copy.source is not None
        moved = copy.source
    else:
        moved = copy.target
    inside = (moved >= 0) & (moved < rows * cols)
    times = np.bincount(moved[inside].reshape(-1), minlength=rows * cols)
    once = int((times == 1).sum())
    outside = int((~inside).sum())
    expected = tile.address.reshape(-1, order="F")[np.where(inside, moved, 0)]
    placed = int((inside & (expected == copy.address)).sum())
    if copy.kind == "accumulator":
        registers = trace.stored[tile.tensor]
        placed = int((at(registers, copy.address) == copy.target).sum())
    if copy.kind == "store":
        placed = int((at(trace.stored[tile.tensor], copy.address) == copy.target).sum())
    size = rows * cols
    ok = once == size and outside == 0 and placed == moved.size == size
    number = f"{once} of {size} elements once, {placed} in their place, {outside} outside"
    return Result("copied once", copy.name, ok, number)


def _vectors(kernel: Kernel, copy: TileCopy) -> Result:
    """The rule `vectors`: what one instruction moves for one thread is contiguous, and aligned to
    its size."""
    size = copy.values * ELEMENT_BYTES
    together = (np.diff(copy.address, axis=2) == 1).all(axis=2)
    aligned = copy.address[:, :, 0] % copy.values == 0
    if copy.kind in ("load", "store"):
        elements = copy.source if copy.kind == "load" else copy.target
        assert elements is not None
        rows = copy.tile.address.shape[0]
        together &= (np.diff(elements, axis=2) == rows).all(axis=2)
        aligned &= elements[:, :, 0] // rows % copy.values == 0
    if copy.kind == "accumulator":
        assert copy.registers is not None
        pairs = copy.registers.reshape(copy.registers.shape[0], -1, 2)  # of a 32-bit register
        together &= (np.diff(pairs, axis=2) == 1).all()
    good = int((together & aligned).sum())
    number = f"{good} of {together.size} {copy.instruction} vectors of {size} bytes whole, aligned"
    return Result("vectors", copy.name, good == together.size, number)


def _addresses(copy: TileCopy, given: Array) -> Result:
    """The rule `addresses`: the kernel's own arithmetic computes the address that the layout
    has."""
    expected = copy.address[:, :, 0] * ELEMENT_BYTES
    right = int((given == expected).sum()) if given.shape == expected.shape else 0
    number = f"{right} of {expected.size} addresses that the kernel computes are the layout's"
    return Result("addresses", copy.name, right == expected.size, number)


def _elements(copy: TileCopy, given: Array) -> Result:
    """The rule `addresses` in global memory: the kernel walks to the elements that the layout
    names."""
    assert copy.source is not None
    expected = copy.source[:, :, 0]
    right = int((given == expected).sum()) if given.shape == expected.shape else 0
    number = f"{right} of {expected.size} vectors that the kernel walks to are the layout's"
    return Result("addresses", copy.name, right == expected.size, number)


def bank_phases(copy: TileCopy) -> Array:
    """The passes over the banks that each phase needs, [warp, instruction, phase]. Without
    conflicts a phase needs one."""
    first = copy.warps[..., 0] * ELEMENT_BYTES  # [warp, lane, instruction]
    size = copy.values * ELEMENT_BYTES
    groups = hardware.phases(copy.instruction, size)
    passes = [
        hardware.wavefronts(first[:, list(group), :].transpose(0, 2, 1), size) for group in groups
    ]
    return np.stack(passes, axis=-1)


def banks(copy: TileCopy) -> Result:
    """The rule `banks`: no two lanes of a phase want different words of the same bank."""
    passes = bank_phases(copy)
    conflicts = int((passes - 1).sum())
    instructions = passes.shape[0] * passes.shape[1]
    number = f"{conflicts} conflicts in {instructions} {copy.instruction} of {passes.size} phases"
    if conflicts:
        number += f", at worst {passes.max()}-way"
    return Result("banks", copy.name, conflicts == 0, number, conflicts)


def _sectors(kernel: Kernel, copy: TileCopy) -> Result:
    """The rule `sectors`: a warp's access to global memory touches no more sectors of 32 bytes than
    its bytes fill."""
    elements = copy.source if copy.kind == "load" else copy.target
    assert elements is not None
    rows = copy.tile.address.shape[0]
    touched = fewest = 0
    for warp in elements[:, :, 0].reshape(-1, hardware.WARP, elements.shape[1]):
        for first in warp.T:
            counts = hardware.sectors(first % rows, first // rows, copy.values)
            touched, fewest = touched + counts[0], fewest + counts[1]
    number = f"{touched} sectors for {fewest} sectors' worth of bytes"
    return Result("sectors", copy.name, touched == fewest, number)


def _check_boxes(kernel: Kernel) -> Iterator[Result]:
    """The rules `copied once` and `swizzle` for TMA: boxes fill each tile once, each element goes
    where the layout has it, a descriptor can describe the box, and the tensor map describes it."""
    for exported in kernel.copies:
        if exported["kind"] != "boxes":
            continue
        tile = kernel.tiles()[exported["tensor"]]
        address, elements = box_elements(exported)
        size = tile.address.size
        once = int((np.bincount(elements.reshape(-1), minlength=size) == 1).sum())
        expected = tile.address.reshape(-1, order="F")[elements]
        placed = int((expected == address).sum())
        name = f"{exported['tensor']}: TMA boxes"
        number = f"{once} of {size} elements once, {placed} in their place"
        yield Result("copied once", name, once == placed == size, number)
        rows, cols = exported["box"]
        span = 16 << exported["swizzle_bits"] if exported["swizzle_bits"] else 16
        starts = [box["address"] * ELEMENT_BYTES for box in exported["boxes"]]
        aligned = all(start % max(8 * span, 128) == 0 for start in starts)
        matches = tuple(tile.swizzle) == (exported["swizzle_bits"], 3, 3)
        mapped = exported["map"] == [rows, cols, exported["swizzle_bits"]]
        ok = rows <= 256 and cols * ELEMENT_BYTES == span and aligned and matches and mapped
        number = (
            f"box {rows} x {cols} ({cols * ELEMENT_BYTES} bytes a row), swizzle span {span} bytes, "
            f"layout swizzle {tuple(tile.swizzle)}, boxes at {starts}"
        )
        if not mapped:
            number += f", the tensor map has boxes {exported['map'][0]} x {exported['map'][1]}"
        yield Result("swizzle", name, ok, number)


@dataclass(frozen=True)
class Report:
    """All results of one kernel."""

    kernel: Kernel
    results: list[Result]

    @property
    def violations(self) -> list[Result]:
        """The results of the proofs that do not hold."""
        return [result for result in self.results if not result.ok]


def check_all(kernels: Iterable[Kernel]) -> list[Report]:
    """Every proof about every kernel."""
    return [Report(kernel, check(kernel)) for kernel in kernels]


def as_json(reports: Iterable[Report]) -> list[dict[str, object]]:
    """All results as plain data."""
    return [
        {"row": report.kernel.name, **dataclasses.asdict(result)}
        for report in reports
        for result in report.results
    ]


def report(reports: Sequence[Report], verbose: bool) -> str:
    """All results as text. Proofs that hold are listed with `verbose`, or if all are of one row."""
    rows = {report.kernel.row.name for report in reports}
    lines = []
    for each in reports:
        verdict = f"{len(each.violations)} VIOLATED" if each.violations else "ok"
        lines.append(f"{each.kernel.name}: {len(each.results)} proofs, {verdict}")
        for result in each.results:
            if verbose or len(rows) == 1 or not result.ok:
                mark = "ok      " if result.ok else "VIOLATED"
                lines.append(f"  {mark} {result.rule:<12} {result.subject}: {result.number}")
    count = sum(len(each.results) for each in reports)
    bad = sum(len(each.violations) for each in reports)
    lines.append(f"{len(rows)} rows, {count} proofs, {bad} violated")
    return "\n".join(lines)
