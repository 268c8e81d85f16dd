"""Proves a product: every a[m, k] * b[n, k] is added to c[m, n] exactly once.

The PTX ISA says which value of which thread is which place of an MMA's operands. With it, and
without CuTe, this proves for each MMA: the values in a row of A belong to one m, the values in a
row of B to one n, those in the same column of both to the same k, and what the accumulator has at
(row, col) is the c[m, n] that the rest of the kernel takes it for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_attention.layouts import hardware
from cute_attention.layouts.model import Array, swizzled
from cute_attention.layouts.result import Result
from cute_attention.layouts.trace import Trace, accumulator_elements, at, parts_of


def _fragments(instruction: str) -> hardware.Fragments:
    if instruction.startswith("mma."):
        return hardware.mma_m16n8k16()
    return hardware.wgmma_m64k16(int(instruction.split("n")[1].split("k")[0]))


def _placed(places: tuple[Array, Array], values: Array) -> Array:
    """[thread, value, rest, block] of all threads as [group, row, col, rest, block]."""
    threads = places[0].shape[0]
    row, col = places
    split = values.reshape(-1, threads, *values.shape[1:])
    shape = (split.shape[0], int(row.max()) + 1, int(col.max()) + 1, *split.shape[3:])
    matrix = np.full(shape, -1, np.int64)
    matrix[:, row, col] = split
    return matrix


def _of_all(matrix: Array, groups: int) -> Array:
    """A matrix of each group, where one may have handed what it has in registers to all."""
    return np.broadcast_to(matrix, (groups, *matrix.shape[1:]))


def _descriptor_operand(trace: Trace, operand: dict[str, Any], groups: int) -> tuple[Array, Array]:
    """(outer, k) of an operand that WGMMA reads through descriptors.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix Descriptor
    Format": 8 x 8 core matrices, `leading` and `stride` bytes apart, the swizzle an XOR of the
    16-byte vector's place with bits 7 and up of the address.
    """
    outer, k = np.arange(operand["rows"])[:, None], np.arange(16)[None, :]
    bits = operand["swizzle_bits"]
    span = 8 << bits  # elements of a swizzled row
    leading, stride = operand["leading_bytes"] // 2, operand["stride_bytes"] // 2
    if operand["major"] == "k":
        offset = outer % 8 * span + outer // 8 * stride + k
    else:
        offset = outer % span + outer // span * leading + k % 8 * span + k // 8 * stride
    starts = np.array(operand["starts"])  # [group, rest, k block]
    starts = np.broadcast_to(starts, (groups, *starts.shape[1:]))
    address = starts[:, None, None] + offset[None, :, :, None, None]
    address = swizzled(address, (bits, 3, 3))
    held = at(trace.contents[operand["tensor"]], address)
    rows = trace.kernel.shape(operand["tensor"])[0]
    row, col = np.where(held < 0, -1, held % rows), np.where(held < 0, -1, held // rows)
    return (col, row) if operand["transposed"] else (row, col)


def _matrices(
    trace: Trace, product: dict[str, Any], side: str, fragments: hardware.Fragments, groups: int
) -> tuple[Array, Array]:
    """(outer, k) of an operand, each [group, outer, k, rest, block], over all parts."""
    outer, k = [], []
    for index, part in enumerate(parts_of(product)):
        if part[side]["from"] == "descriptors":
            matrices = _descriptor_operand(trace, part[side], groups)
        else:
            found = trace.operand(product, side, index)
            places = fragments.a if side == "a" else fragments.b
            assert places is not None
            outer_k = _placed(places, found.outer), _placed(places, found.k)
            matrices = _of_all(outer_k[0], groups), _of_all(outer_k[1], groups)
        outer.append(matrices[0])
        k.append(matrices[1])
    return np.concatenate(outer, axis=-1), np.concatenate(k, axis=-1)


def mma_count(product: dict[str, Any]) -> int:
    """How many MMAs all warps or warpgroups issue for one tile."""
    elements = accumulator_elements(product)
    groups = elements.shape[0] // _fragments(product["instruction"]).threads
    return groups * elements.shape[2] * elements.shape[3] * (product["tile"][2] // 16)


def check_product(trace: Trace, product: dict[str, Any]) -> Result:
    """The rule `fragments` for one product."""
    m, n, k = product["tile"]
    fragments = _fragments(product["instruction"])
    elements = accumulator_elements(product)
    groups = elements.shape[0] // fragments.threads
    c = _placed(fragments.c, elements)  # [group, row, col, rest m, rest n]
    a_m, a_k = _matrices(trace, product, "a", fragments, groups)  # [group, row, k, rest m, block]
    b_n, b_k = _matrices(trace, product, "b", fragments, groups)  # [group, col, k, rest n, block]
    right_a = (a_m == a_m[:, :, :1, :, :1]) & (a_k == a_k[:, :1, :, :1, :]) & (a_m >= 0)
    right_b = (b_n == b_n[:, :, :1, :, :1]) & (b_k == a_k[:, :1, :, :1, :]) & (b_n >= 0)
    c_m = a_m[:, :, 0, :, 0][:, :, None, :, None]
    c_n = b_n[:, :, 0, :, 0][:, None, :, None, :]
    right_c = (c == c_m + m * c_n) & (c_m >= 0) & (c_n >= 0)
    once = int((np.bincount(c[right_c].reshape(-1), minlength=m * n) == 1).sum())
    k_once = np.sort(a_k[:, 0, :, 0, :].reshape(groups, -1), axis=1)
    every_k = bool((k_once == np.arange(k)).all()) if k_once.shape[1] == k else False
    wrong = int((~right_a).sum() + (~right_b).sum() + (~right_c).sum())
    ok = wrong == 0 and once == m * n and every_k
    number = (
        f"{wrong} of {right_a.size + right_b.size + right_c.size} values wrong, "
        f"{once} of {m * n} sums once, {'every' if every_k else 'not every'} k of {k}, "
        f"{mma_count(product)} {product['instruction']}"
    )
    return Result("fragments", product["formula"], ok, number)
