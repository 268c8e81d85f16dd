"""Dropout bits: a pure function of (seed, batch, head, query, key).

With `i` the query and `j` the key, both counted from the start of their sequence:

    r(i)     word i%4 of Philox4x32-7: key the seed, counter (i//4, batch*heads + head, 0, 0)
    start    r(16*(i//16) + i%8)
    step     r(16*(i//16) + i%8 + 8) | 1
    word     mix(start + step * (8*(j//16) + j%8)  modulo 2**32)
    byte     2*((i%16)//8) + (j%16)//8          of the word, little-endian

So a word decides about four scores, those of queries i and i + 8 and keys j and j + 8, and costs a
kernel a mixer of 32-bit words instead of a call of Philox. A probability is dropped where its byte
is below `k = round(256 * p)`; what is kept is multiplied by `256 / (256 - k)`. Nothing here depends
on tile shapes, so every backend and every architecture draws the same bits. `docs/dropout.md` says
why the bits are these, and how they were tested.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Salmon et al., "Parallel random numbers", SC 2011
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

_BLOCK, _HALF = 16, 8  # queries or keys of a block; the two of a class are half a block apart


def drop_count(dropout_p: float) -> int:
    """How many of the 256 values of a byte mean "drop": `256 * dropout_p` rounded, halves up."""
    return math.floor(256.0 * dropout_p + 0.5)


def keep_scale(dropout_p: float) -> float:
    """What kept probabilities are multiplied by, `256 / (256 - k)`; 0 where all are dropped."""
    kept = 256 - drop_count(dropout_p)
    return 256.0 / kept if kept else 0.0


def draw_seed(device: torch.device | str) -> Tensor:
    """A fresh seed, int64 `[1]`, from the generator of `device`; never waits for the device."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def as_seed(seed: int | Tensor | None, device: torch.device | str) -> Tensor:
    """`seed` as an int64 tensor `[1]` on `device`; None draws one; an int counts modulo 2**64."""
    if seed is None:
        return draw_seed(device)
    if isinstance(seed, Tensor):
        return seed.to(device=device, dtype=torch.int64).reshape(1)
    signed = (int(seed) + 2**63) % 2**64 - 2**63
    return torch.full((1,), signed, dtype=torch.int64, device=device)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> Tensor:
    """Philox4x32-7 of broadcastable int64 counters, each in [0, 2**32).

    Returns int64 `[..., 4]`, the four output words, each in [0, 2**32). A 32x32-bit product
    overflows int64, but int64 wraps modulo 2**64 and the masked shift drops the sign, so both
    halves are those of the unsigned product.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
        )
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that makes a progression look random; int32, changed in place.

    The constants are those of the first mixer that hash-prospector found (Wellons 2018).

    int32 wraps modulo 2**32 as the kernels' uint32 does; the masks drop what `>>` copies of the
    sign.
    """
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x2C1B3C6D
    x ^= (x >> 12) & 0xFFFFF
    x *= 0x297A2D39
    x ^= (x >> 15) & 0x1FFFF
    return x


def row_words(seed: Tensor, batch_heads: tuple[int, int], rows: tuple[int, int]) -> Tensor:
    """The random word of each query, int64 `[batch_heads, rows]`; `rows` in multiples of 4."""
    device = seed.device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    fours = torch.arange(rows[0] // 4, rows[1] // 4, dtype=torch.int64, device=device)
    heads = torch.arange(*batch_heads, dtype=torch.int64, device=device)
    return philox((fours, heads[:, None], zero, zero), seed).flatten(-2)


def random_bytes(
    seed: Tensor, batch_heads: tuple[int, int], rows: tuple[int, int], cols: tuple[int, int]
) -> Tensor:
    """The byte of every score of a block, uint8 `[batch_heads, rows, cols]`, each range half open.

    Args:
        seed: int64 `[1]`; its device is that of the result.
        batch_heads: range of `batch * heads + head`.
        rows: range of queries, counted from the start of their sequence; any start and end.
        cols: range of keys, likewise.
    """
    row0, col0 = rows[0] // _BLOCK * _BLOCK, cols[0] // _BLOCK * _BLOCK
    row1, col1 = -(-rows[1] // _BLOCK) * _BLOCK, -(-cols[1] // _BLOCK) * _BLOCK

    both = row_words(seed, batch_heads, (row0, row1)).to(torch.int32)  # keeps the low 32 bits
    start, step = both.unflatten(-1, (-1, 2, _HALF, 1)).unbind(2)  # [bh, row blocks, i%8, 1]
    classes = torch.arange(col0 // 2, col1 // 2, dtype=torch.int32, device=seed.device)
    words = mix(start + (step | 1) * classes)  # [bh, row blocks, i%8, col blocks * 8]

    # Bytes of a word: (query, key), (query, key + 8), (query + 8, key), (query + 8, key + 8).
    block = words.view(torch.uint8).unflatten(-1, (-1, _HALF, 2, 2)).permute(0, 1, 5, 2, 3, 6, 4)
    block = block.reshape(batch_heads[1] - batch_heads[0], row1 - row0, col1 - col0)
    return block[:, rows[0] - row0 : rows[1] - row0, cols[0] - col0 : cols[1] - col0]


def keep_mask(
    seed: Tensor,
    dropout_p: float,
    batch_heads: tuple[int, int],
    rows: tuple[int, int],
    cols: tuple[int, int],
) -> Tensor:
    """True where a probability is kept, `[batch_heads, rows, cols]`; arguments as `random_bytes`.

    Only for a `dropout_p` that drops something: `drop_count(dropout_p) > 0`.
    """
    # Not `>= drop_count`: 256 is no uint8, and comparing with it would wrap to 0.
    return random_bytes(seed, batch_heads, rows, cols) > drop_count(dropout_p) - 1
