"""What the hardware does with addresses and registers, written from the PTX ISA alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_attention.layouts.model import ELEMENT_BYTES, Array

BANKS = 32
BANK_BYTES = 4
SECTOR_BYTES = 32
WARP = 32


@dataclass(frozen=True)
class Chip:
    """Limits of one SM (CUDA C++ Programming Guide, "Technical Specifications")."""

    name: str
    shared_memory: int  # bytes of an SM; each CTA takes 1 KB more than it asks for
    cta_shared_memory: int  # the most that a CTA may ask for
    threads: int = 2048
    registers: int = 65536
    ctas: int = 32


CHIPS = {
    "sm80": Chip("compute capability 8.0", 164 * 1024, 163 * 1024),
    "sm90": Chip("compute capability 9.0", 228 * 1024, 227 * 1024),
}


def moves_matrices(instruction: str) -> bool:
    """Whether a warp moves matrices of 8 x 8 elements: a lane gives the address of a row, but its
    registers hold elements of all rows."""
    return instruction.startswith(("ldmatrix", "stmatrix"))


def _matrices(instruction: str) -> int:
    return int(instruction.split(".x")[1][0])


def phases(instruction: str, vector_bytes: int) -> list[range]:
    """The lanes of a warp in groups: a shared-memory instruction serves one group after the other.

    ldmatrix and stmatrix serve the 8 lanes that give the row addresses of one matrix. Vectors of 16
    bytes are served by quarters of a warp, vectors of 8 bytes by halves, smaller ones by the whole
    warp.
    """
    if moves_matrices(instruction):
        return [range(8 * matrix, 8 * matrix + 8) for matrix in range(_matrices(instruction))]
    lanes = WARP * 4 // max(vector_bytes, 4)
    return [range(first, first + lanes) for first in range(0, WARP, lanes)]


def wavefronts(addresses: Array, vector_bytes: int) -> Array:
    """How many passes over the banks the lanes of a group need: the bank that has to give the most
    different words decides.

    addresses: [..., lane], in bytes. Returns [...].
    """
    words = max(vector_bytes // BANK_BYTES, 1)
    word = addresses[..., None] // BANK_BYTES + np.arange(words)
    word = np.sort(word.reshape(*addresses.shape[:-1], -1), axis=-1)
    first = np.ones(word.shape, bool)
    first[..., 1:] = word[..., 1:] != word[..., :-1]
    bank = word % BANKS
    counts = [(first & (bank == index)).sum(-1) for index in range(BANKS)]
    return np.max(counts, axis=0)


def matrix_elements(instruction: str, rows: Array) -> Array:
    """Addresses of the elements that each lane has in registers: that ldmatrix gives it, or that
    stmatrix takes from it.

    PTX ISA, "Warp-level matrix load instruction: ldmatrix" and "Warp-level matrix store
    instruction: stmatrix". rows: [warp, lane, instruction], the address that a lane gives. Returns
    [warp, lane, instruction, value], in elements.
    """
    lane = np.arange(WARP)
    held = []
    for matrix in range(_matrices(instruction)):
        for element in range(2):
            if instruction.endswith("trans"):
                row, col = 2 * (lane % 4) + element, lane // 4
            else:
                row, col = lane // 4, 2 * (lane % 4) + element
            held.append(rows[:, 8 * matrix + row, :] + col[None, :, None])
    return np.stack(held, axis=-1)


@dataclass(frozen=True)
class Fragments:
    """The row and column in an MMA's operand of each value that a thread holds, [thread, value]."""

    threads: int
    a: tuple[Array, Array]  # (m, k)
    b: tuple[Array, Array] | None  # (n, k); None where it is read from shared memory
    c: tuple[Array, Array]  # (m, n)


def mma_m16n8k16() -> Fragments:
    """PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type"."""
    lane = np.arange(WARP)[:, None]
    group, inside = lane // 4, lane % 4
    v = np.arange(8)[None, :]
    a = (group + 8 * (v // 2 % 2), 2 * inside + v % 2 + 8 * (v // 4))
    v = np.arange(4)[None, :]
    b = (group + 0 * v, 2 * inside + v % 2 + 8 * (v // 2))
    c = (group + 8 * (v // 2), 2 * inside + v % 2)
    return Fragments(WARP, a, b, c)


def wgmma_m64k16(n: int) -> Fragments:
    """PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"."""
    thread = np.arange(4 * WARP)[:, None]
    row, inside = 16 * (thread // WARP) + thread % WARP // 4, thread % 4
    v = np.arange(8)[None, :]
    a = (row + 8 * (v // 2 % 2), 2 * inside + v % 2 + 8 * (v // 4))
    v = np.arange(n // 2)[None, :]
    c = (row + 8 * (v // 2 % 2), 2 * inside + v % 2 + 8 * (v // 4))
    return Fragments(4 * WARP, a, None, c)


def sectors(rows: Array, cols: Array, values: int) -> tuple[int, int]:
    """How many sectors of 32 bytes the lanes touch, and the fewest that could hold what they move.

    rows, cols: [lane], where each lane's vector of `values` elements begins. Rows begin at sectors.
    """
    first = cols * ELEMENT_BYTES // SECTOR_BYTES
    last = ((cols + values) * ELEMENT_BYTES - 1) // SECTOR_BYTES
    touched = {
        (int(row), sector)
        for row, begin, end in zip(rows, first, last, strict=True)
        for sector in range(int(begin), int(end) + 1)
    }
    fewest = -(-len(rows) * values * ELEMENT_BYTES // SECTOR_BYTES)
    return len(touched), fewest
