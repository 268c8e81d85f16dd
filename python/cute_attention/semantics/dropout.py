"""Dropout bits: Philox4x32-7 as a pure function of (seed, batch, head, query, key).

One Philox call serves a patch of 16 queries by 32 keys per thread of an m16n8 accumulator, so a
kernel draws 16 bytes for the 16 scores it holds in registers. With `i` the query and `j` the key,
both counted from the start of their sequence:

    key      the 64-bit seed, low word first
    counter  (8*(i//16) + i%8,  4*(j//32) + (j%8)//2,  batch*heads + head,  0)
    byte     8*((i%16)//8) + 2*((j%32)//8) + j%2          of the 16, little-endian

A probability is dropped where its byte is below `k = round(256 * p)`; what is kept is multiplied by
`256 / (256 - k)`. Nothing here depends on tile shapes, so every backend and every architecture
draws the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Salmon et al., "Parallel random numbers", SC 2011
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

_PATCH_ROWS, _PATCH_COLS = 16, 32
_CALL_ROWS, _CALL_COLS = 8, 4  # Philox calls along each side of a patch


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
    device = seed.device
    patch_rows = (rows[0] // _PATCH_ROWS, -(-rows[1] // _PATCH_ROWS))
    patch_cols = (cols[0] // _PATCH_COLS, -(-cols[1] // _PATCH_COLS))
    n_rows, n_cols = patch_rows[1] - patch_rows[0], patch_cols[1] - patch_cols[0]

    def count(first: int, last: int) -> Tensor:
        return torch.arange(first, last, dtype=torch.int64, device=device)

    words = philox(
        (
            count(patch_rows[0] * _CALL_ROWS, patch_rows[1] * _CALL_ROWS)[:, None],
            count(patch_cols[0] * _CALL_COLS, patch_cols[1] * _CALL_COLS),
            count(*batch_heads)[:, None, None],
            torch.zeros((), dtype=torch.int64, device=device),
        ),
        seed,
    )  # [batch_heads, n_rows * 8, n_cols * 4, 4]
    low_bytes = words.view(torch.uint8).unflatten(-1, (4, 8))[..., :4]  # of little-endian int64
    # Byte 8*half + 2*group + parity of call (i % 8, (j % 8) // 2) belongs to score
    # (8*half + i%8, 8*group + 2*((j % 8) // 2) + parity) of its patch.
    n = batch_heads[1] - batch_heads[0]
    patches = low_bytes.reshape(
        n, n_rows, _CALL_ROWS, n_cols, _CALL_COLS, 2, 4, 2
    )  # (bh, patch row, i%8, patch col, (j%8)//2, half, group, parity)
    block = patches.permute(0, 1, 5, 2, 3, 6, 4, 7).reshape(
        n, n_rows * _PATCH_ROWS, n_cols * _PATCH_COLS
    )
    row0, col0 = patch_rows[0] * _PATCH_ROWS, patch_cols[0] * _PATCH_COLS
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
