"""Numbers in fp32 that a warpgroup hands to another through shared memory: each thread reads what
the same thread of the other has written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_attention.layouts.model import Array, Kernel
from cute_attention.layouts.result import Result
from cute_attention.layouts.staged import NUMBER_BYTES, vector_passes, vectors_of


@dataclass(frozen=True)
class Handed:
    """The numbers of the elements of an accumulator, which the threads of another accumulator with
    the same tile read."""

    name: str
    tensor: str
    stages: int  # how many buffers there are
    product: dict[str, Any]  # whose accumulator the numbers are of
    written: Array  # the elements that a thread writes the numbers of, [thread, vector, number]
    wanted: Array  # the elements that a thread reads numbers for, [thread, vector, number]
    vectors: Array  # where each vector lies in a buffer, counted in vectors, [thread, vector]

    @property
    def read(self) -> Array:
        """The elements whose numbers a thread reads, [thread, vector, number]; -1 where nobody has
        written."""
        held = np.full((int(self.vectors.max()) + 1, self.written.shape[2]), -1, np.int64)
        held[self.vectors] = self.written
        return held[self.vectors]


def handed(kernel: Kernel) -> list[Handed]:
    """All of a kernel."""
    found = []
    for exported in kernel.copies:
        if exported["kind"] == "handed":
            product, reader = map(kernel.product, (exported["accumulator"], exported["reader"]))
            found.append(
                Handed(
                    f"{exported['tensor']}: from {product['name']} to {reader['name']}",
                    exported["tensor"],
                    exported["stages"],
                    product,
                    vectors_of(product, exported["numbers"]),
                    vectors_of(reader, exported["numbers"]),
                    np.array(exported["vectors"], np.int64),
                )
            )
    return found


def check_handed(kernel: Kernel) -> Iterator[Result]:
    """The rules `copied once`, `fragments` and `banks` of what warpgroups hand to each other."""
    buffers = {buffer["name"]: buffer for buffer in kernel.plan["buffers"]}
    for each in handed(kernel):
        rows, cols, _ = each.product["tile"]
        numbers = each.written.shape[2]
        once = int((np.bincount(each.written.reshape(-1), minlength=rows * cols) == 1).sum())
        room = buffers[each.tensor]["bytes"] // (each.stages * numbers * NUMBER_BYTES)
        places = np.unique(each.vectors[(each.vectors >= 0) & (each.vectors < room)]).size
        text = (
            f"{once} of {rows * cols} numbers once, in {places} places for {each.vectors.size} "
            f"vectors, a buffer has room for {room}"
        )
        ok = once == rows * cols == each.written.size and places == each.vectors.size == room
        yield Result("copied once", each.name, ok, text)
        right = int((each.read == each.wanted).sum())
        text = f"{right} of {each.wanted.size} elements get the number of the same element"
        yield Result("fragments", each.name, right == each.wanted.size, text)
        passes = vector_passes(each.vectors, numbers * NUMBER_BYTES)
        conflicts = 2 * int((passes - 1).sum())
        count = passes.shape[0] * passes.shape[1]
        text = f"{conflicts} conflicts in {count} stores and {count} loads of {passes.size} phases"
        yield Result("banks", each.name, conflicts == 0, text, conflicts)
