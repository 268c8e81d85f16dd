"""One number a query, read from shared memory by all threads that hold a part of its scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cute_attention.layouts import hardware
from cute_attention.layouts.model import Array, Kernel, table
from cute_attention.layouts.result import Result
from cute_attention.layouts.trace import accumulator_elements

NUMBER_BYTES = 4


@dataclass(frozen=True)
class RowNumbers:
    """LSE or delta in shared memory, as an accumulator's threads read it."""

    name: str
    address: Array  # number that goes with each element of the accumulator, [thread, element]
    column: Array  # the query that the element is of, [thread, element]

    @property
    def pairs(self) -> Array:
        """Addresses of 64-bit loads, each number once: [thread, instruction, 2]."""
        each = np.stack([np.unique(addresses) for addresses in self.address])
        return each.reshape(each.shape[0], -1, 2)


def row_numbers(kernel: Kernel) -> list[RowNumbers]:
    """All of a kernel."""
    found = []
    for exported in kernel.copies:
        if exported["kind"] == "numbers":
            product = kernel.product(exported["accumulator"])
            elements = accumulator_elements(product)
            elements = elements.reshape(elements.shape[0], -1)
            address = table(exported["layout"]).reshape(-1, order="F")[elements]
            name = f"{exported['tensor']}: shared -> registers ({product['formula']})"
            found.append(RowNumbers(name, address, elements // product["tile"][0]))
    return found


def number_passes(numbers: RowNumbers) -> Array:
    """Passes of each phase of each load, [warp, instruction, phase]."""
    first = numbers.pairs[..., 0] * NUMBER_BYTES  # [thread, instruction]
    warps = first.reshape(-1, hardware.WARP, first.shape[1]).transpose(0, 2, 1)
    phases = hardware.phases("vector", 2 * NUMBER_BYTES)
    passes = [hardware.wavefronts(warps[..., list(lanes)], 2 * NUMBER_BYTES) for lanes in phases]
    return np.stack(passes, axis=-1)


def check_numbers(kernel: Kernel) -> Iterator[Result]:
    """The rules `fragments`, `vectors` and `banks` of the numbers of queries."""
    for numbers in row_numbers(kernel):
        right = int((numbers.address == numbers.column).sum())
        total = numbers.address.size
        text = f"{right} of {total} elements get the number of their query"
        yield Result("fragments", numbers.name, right == total, text)
        pairs = numbers.pairs
        whole = int(((np.diff(pairs)[..., 0] == 1) & (pairs[..., 0] % 2 == 0)).sum())
        text = f"{whole} of {pairs[..., 0].size} pairs of 8 bytes whole, aligned"
        yield Result("vectors", numbers.name, whole == pairs[..., 0].size, text)
        passes = number_passes(numbers)
        conflicts = int((passes - 1).sum())
        loads = passes.shape[0] * passes.shape[1]
        text = f"{conflicts} conflicts in {loads} loads of 8 bytes of {passes.size} phases"
        yield Result("banks", numbers.name, conflicts == 0, text, conflicts)
