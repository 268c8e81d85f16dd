"""Padding removed from a batch of sequences, and put back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

Unpadded = tuple[Tensor, Tensor, Tensor, int, Tensor]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> Unpadded:
    """The tokens of a padded batch one after the other; differentiable. Waits for the device.

    Args:
        hidden_states: `[batch, seqlen, ...]`.
        attention_mask: bool or int `[batch, seqlen]`, true or 1 for a token.
        unused_mask: likewise, for tokens that keep a row and are not used.

    Returns:
        `(x, indices, cu_seqlens, max_seqlen, seqused)`: `x [total, ...]`, the place of each of its
        rows among all `batch * seqlen`, int32 `[batch + 1]` the row at which each sequence ends
        after a 0, the longest of these as an int, and int32 `[batch]` how many tokens of each are
        used.
    """
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        longest,
        attention_mask.sum(-1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` where a row of the batch holds several sequences, one after the other.

    Args:
        hidden_states: `[batch, seqlen, ...]`.
        attention_mask_in_length: int `[batch, seqlen]`: of each row of the batch first the lengths
            of its sequences, then zeros.

    Returns:
        `(x, indices, cu_seqlens, max_seqlen)`, as `unpad_input`.
    """
    seqlen = attention_mask_in_length.shape[-1]
    places = torch.arange(seqlen, device=attention_mask_in_length.device)
    is_token = places < attention_mask_in_length.sum(-1, keepdim=True)
    indices = is_token.flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        int(lengths.max()) if lengths.numel() else 0,
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`[batch, seqlen, ...]` with the rows of `hidden_states [total, ...]` at `indices`, and zeros
    elsewhere; differentiable."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input [rows, ...]` at `indices`; differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`[first_axis_dim, ...]` with the rows of `values` at `indices`, and zeros elsewhere;
    differentiable."""
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)
