"""Sums in fp32 that threads write to shared memory, from where bulk additions add them to global
memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_attention.layouts import hardware
from cute_attention.layouts.model import Array, Kernel, table
from cute_attention.layouts.result import Result
from cute_attention.layouts.trace import accumulator

NUMBER_BYTES = 4


def vectors_of(product: dict[str, Any], numbers: int) -> Array:
    """The elements of a product's accumulator in vectors of so many registers, in their order:
    [thread, vector, number]."""
    fragment = table(product["c"]["registers"]).reshape(-1, order="F")
    elements = accumulator(product)[:, fragment]
    return elements.reshape(elements.shape[0], -1, numbers)


def vector_passes(vectors: Array, size: int) -> Array:
    """The passes over the banks of each phase in which threads move vectors of `size` bytes, [warp,
    instruction, phase]. vectors: [thread, instruction], counted in vectors."""
    first = vectors.reshape(-1, hardware.WARP, vectors.shape[1]) * size
    first = first.transpose(0, 2, 1)  # [warp, instruction, lane]
    phases = hardware.phases("vector", size)
    return np.stack(
        [hardware.wavefronts(first[..., list(lanes)], size) for lanes in phases], axis=-1
    )


@dataclass(frozen=True)
class StagedSums:
    """An accumulator in shared memory, in vectors of a few numbers of a thread."""

    name: str
    tensor: str
    accumulator: str
    elements: Array  # of the accumulator's tile, [thread, vector, number]
    vectors: Array  # where each vector lies, counted in vectors, [thread, vector]

    @property
    def numbers(self) -> int:
        """How many numbers a vector has."""
        return self.elements.shape[2]

    @property
    def passes(self) -> Array:
        """The passes over the banks of each phase of each store, [warp, instruction, phase]."""
        return vector_passes(self.vectors, self.numbers * NUMBER_BYTES)


def staged_sums(kernel: Kernel) -> list[StagedSums]:
    """All of a kernel."""
    found = []
    for exported in kernel.copies:
        if exported["kind"] == "staged":
            product = kernel.product(exported["accumulator"])
            elements = vectors_of(product, exported["numbers"])
            vectors = np.array(exported["vectors"], np.int64)
            name = f"{exported['tensor']}: registers -> shared, to be added"
            found.append(StagedSums(name, exported["tensor"], product["name"], elements, vectors))
    return found


def check_staged(kernel: Kernel) -> Iterator[Result]:
    """The rules `copied once` and `banks` of staged sums."""
    buffers = {buffer["name"]: buffer for buffer in kernel.plan["buffers"]}
    for staged in staged_sums(kernel):
        rows, cols, _ = kernel.product(staged.accumulator)["tile"]
        elements = staged.elements.reshape(-1)
        once = int((np.bincount(elements, minlength=rows * cols) == 1).sum())
        room = buffers[staged.tensor]["bytes"] // (staged.numbers * NUMBER_BYTES)
        inside = staged.vectors[(staged.vectors >= 0) & (staged.vectors < room)]
        places = np.unique(inside).size
        text = (
            f"{once} of {rows * cols} sums once, in {places} places for {staged.vectors.size} "
            f"vectors, the buffer has room for {room}"
        )
        ok = once == rows * cols == elements.size and places == staged.vectors.size == room
        yield Result("copied once", staged.name, ok, text)
        passes = staged.passes
        conflicts = int((passes - 1).sum())
        stores = passes.shape[0] * passes.shape[1]
        text = f"{conflicts} conflicts in {stores} stores of {passes.size} phases"
        yield Result("banks", staged.name, conflicts == 0, text, conflicts)
