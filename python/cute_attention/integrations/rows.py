"""Rows of padded batches and of sequences in one row, brought into the form of `attention_varlen`.

Everything but the number of sequences that share a row is computed on the device, so that nothing
waits for it and a graph can be captured: the rows of tokens come first, those of padding after
them, where `attention_varlen` reads nothing and writes zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Rows(NamedTuple):
    """The order in which rows of `[batch, seqlen]` lie when they are packed."""

    taken: Tensor  # [batch * seqlen]: which row comes next
    places: Tensor  # [batch * seqlen]: where each row went
    offsets: Tensor  # int32 [batch + 1]: cu_seqlens

    def pack(self, tensor: Tensor) -> Tensor:
        """`[batch, seqlen, ...]` to `[batch * seqlen, ...]`, tokens first."""
        return tensor.flatten(0, 1).index_select(0, self.taken)

    def unpack(self, tensor: Tensor, batch: int) -> Tensor:
        """What `pack` has packed, as it was."""
        return tensor.index_select(0, self.places).unflatten(0, (batch, -1))


def rows_of(valid: Tensor) -> Rows:
    """The packed order of a batch with padding.

    Args:
        valid: bool `[batch, seqlen]`, True for a token, False for padding.
    """
    flat = valid.flatten()
    tokens = flat.cumsum(0)
    padding = (~flat).cumsum(0)
    places = torch.where(flat, tokens - 1, tokens[-1] + padding - 1)
    order = torch.arange(len(flat), device=flat.device)
    taken = torch.empty_like(order).scatter_(0, places, order)
    offsets = pad(valid.sum(1).cumsum(0), (1, 0)).int()
    return Rows(taken, places, offsets)


def every_row(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """cu_seqlens of a batch without padding."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen


class Sequences(NamedTuple):
    """Sequences that lie one after the other in the rows of a batch."""

    offsets: Tensor  # int32 [number of sequences + 1]
    longest: int


def sequences_of(ids: Tensor) -> Sequences:
    """Where the sequences of a batch begin and end; waits for the device.

    Args:
        ids: `[batch, seqlen]`: equal for neighbours of one sequence. None goes on in another row.
    """
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    offsets = pad(begins.flatten().nonzero().flatten(), (0, 1), value=ids.numel())
    return Sequences(offsets.int(), int(offsets.diff().max()))


def sequences_by_position(positions: Tensor, batch: int) -> Sequences | None:
    """Where sequences begin and end by the positions of their tokens, which go up by one inside of
    a sequence; None where each row is one sequence. Waits for the device.

    Args:
        positions: `[batch, seqlen]`, or `[1, seqlen]` for all rows.
        batch: how many rows there are.
    """
    jumps = positions[:, 1:] - positions[:, :-1] != 1
    if not jumps.any():
        return None
    ids = pad(jumps.cumsum(1), (1, 0))
    return sequences_of(ids.expand(batch, -1))
