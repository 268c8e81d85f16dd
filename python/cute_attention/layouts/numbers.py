"""One number for each query, such as its LSE: in shared memory, where all threads that hold scores
of the query read it, exchanged by the warps that do, or in registers of each of these threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_attention.layouts import hardware
from cute_attention.layouts.model import Array, Kernel, table
from cute_attention.layouts.result import Result
from cute_attention.layouts.trace import accumulator, accumulator_elements

NUMBER_BYTES = 4


@dataclass(frozen=True)
class RowNumbers:
    """LSE or delta in shared memory, as an accumulator's threads read it."""

    name: str
    address: Array  # of the number for each element of the accumulator, [thread, element]
    column: Array  # the query that each element belongs to, [thread, element]

    @property
    def pairs(self) -> Array:
        """Addresses of 64-bit loads, each number once: [thread, instruction, 2]."""
        each = np.stack([np.unique(addresses) for addresses in self.address])
        return each.reshape(each.shape[0], -1, 2)


def _in_order(product: dict[str, Any]) -> Array:
    """The elements of a product's accumulator in CuTe's order, [thread, element]."""
    elements = accumulator_elements(product).transpose(0, 3, 2, 1)
    return elements.reshape(elements.shape[0], -1)


def row_numbers(kernel: Kernel) -> list[RowNumbers]:
    """All of a kernel."""
    found = []
    for exported in kernel.copies:
        if exported["kind"] == "numbers":
            product = kernel.product(exported["accumulator"])
            elements = _in_order(product)
            taken = _in_order(kernel.product(exported["partition"]))
            address = table(exported["layout"]).reshape(-1, order="F")[taken]
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


@dataclass(frozen=True)
class RowExchange:
    """Numbers of rows of S whose columns several warps share. Each warp writes its own numbers and
    reads those of the others."""

    name: str
    written: Array  # [thread, row]
    read: Array  # [thread, row of another column]
    numbers: int  # how many there are, of all queries and columns

    @property
    def store_passes(self) -> Array:
        """[warp, instruction]"""
        return _word_passes(self.written)

    @property
    def load_passes(self) -> Array:
        """[warp, instruction]"""
        return _word_passes(self.read)


def _word_passes(address: Array) -> Array:
    warps = address.reshape(-1, hardware.WARP, address.shape[1]).transpose(0, 2, 1)
    return hardware.wavefronts(warps * NUMBER_BYTES, NUMBER_BYTES)


def row_exchanges(kernel: Kernel) -> list[RowExchange]:
    """All of a kernel."""
    found = []
    for exported in kernel.copies:
        if exported["kind"] == "exchange":
            product = kernel.product(exported["accumulator"])
            queries, elements = product["tile"][0], accumulator_elements(product)
            rows = np.stack([np.unique(own % queries) for own in elements])
            column = np.repeat(np.array(exported["columns"]), hardware.WARP)[:, None]
            columns = int(column.max()) + 1
            each = [(column + i) % columns * queries + rows for i in range(columns)]
            name = f"{exported['tensor']}: exchanged by {columns} columns of warps"
            read = np.concatenate(each[1:], axis=1)
            found.append(RowExchange(name, each[0], read, columns * queries))
    return found


def _check_exchanges(kernel: Kernel) -> Iterator[Result]:
    for exchange in row_exchanges(kernel):
        written = np.unique(exchange.written)
        right = int(np.isin(np.unique(exchange.read), written).sum())
        text = f"{written.size} of {exchange.numbers} numbers written, {right} read by other warps"
        ok = written.size == right == exchange.numbers
        yield Result("fragments", exchange.name, ok, text)
        passes = [exchange.store_passes, exchange.load_passes]
        conflicts = int(sum((each - 1).sum() for each in passes))
        text = f"{conflicts} conflicts in {sum(each.size for each in passes)} words of a warp"
        yield Result("banks", exchange.name, conflicts == 0, text, conflicts)


def _check_held(kernel: Kernel) -> Iterator[Result]:
    """The rule `fragments` of numbers in registers: a thread has those of the rows of its
    accumulator."""
    for exported in kernel.copies:
        if exported["kind"] == "held":
            product = kernel.product(exported["accumulator"])
            registers = table(exported["registers"])  # [row of a thread, column of a thread]
            registers = registers.reshape(registers.shape[0], -1)
            held = accumulator(product)
            rows = held[:, registers] % product["tile"][0]  # [thread, row, column]
            right = int((rows == np.array(exported["rows"])[:, :, None]).sum())
            ok = right == held.size == rows.size and np.unique(registers).size == held.shape[1]
            name = f"{exported['tensor']}: in registers ({product['formula']})"
            text = f"{right} of {held.size} elements get the number of their query"
            yield Result("fragments", name, ok, text)


def check_numbers(kernel: Kernel) -> Iterator[Result]:
    """The rules `fragments`, `vectors` and `banks` of the numbers of queries."""
    yield from _check_exchanges(kernel)
    yield from _check_held(kernel)
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
