"""Keys and values from pages: where a token lies, and a copy of the tokens one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import on_device, tensors, type_name


def check_table(name: str, label: str, table: Tensor, device: torch.device) -> None:
    """int32 `[batch, pages of a sequence]` on `device`."""
    tensors(name, **{label: table})
    if table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: {label} has dtype {table.dtype}, expected torch.int32")
    if table.dim() != 2:
        raise ValueError(
            f"{name}: {label} has shape {list(table.shape)}, expected [batch, pages of a sequence]"
        )
    on_device(name, label, table, device)


def check_room(name: str, label: str, table: Tensor, page_size: int, tokens: int) -> None:
    """Raise where a sequence of `tokens` has more pages than a row of the table."""
    if tokens > table.shape[1] * page_size:
        raise RuntimeError(
            f"{name}: {label} has shape {list(table.shape)}, expected "
            f"[batch, at least {-(-tokens // page_size)}]: a sequence has {tokens} tokens, a page "
            f"holds {page_size}"
        )


def check_entries(name: str, label: str, table: Tensor, page_size: int, pages: int,
                  lengths: list[int]) -> None:  # fmt: skip
    """Raise where a page that a sequence needs is none; for tables whose values can be read."""
    for row, tokens in zip(table.tolist(), lengths, strict=True):
        needed = row[: -(-tokens // page_size)]
        wrong = [page for page in needed if not 0 <= page < pages]
        if wrong:
            raise RuntimeError(
                f"{name}: {label} holds {wrong[0]}, expected pages from 0 to {pages - 1}"
            )


def check_integers(name: str, label: str, value: object, batch: int, device: torch.device) -> None:
    """Integers `[batch]` on `device`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {label} is {type_name(value)}, expected a torch.Tensor")
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: {label} has dtype {value.dtype}, expected torch.int32")
    if value.shape != (batch,):
        raise ValueError(f"{name}: {label} has shape {list(value.shape)}, expected [{batch}]")
    on_device(name, label, value, device)


def gather(pages: Tensor, table: Tensor, tokens: int) -> Tensor:
    """The first `tokens` of each sequence, up to whole pages, one sequence after the other.

    Entries of the table for pages that a sequence does not need may hold anything.

    Args:
        pages: `[pages, page_size, heads_kv, head_dim]`.
        table: `[batch, pages of a sequence]`.
        tokens: how many of each sequence.

    Returns:
        A copy, `[batch, tokens up to whole pages, heads_kv, head_dim]`.
    """
    needed = table[:, : -(-tokens // pages.shape[1])].clamp(0, max(pages.shape[0] - 1, 0))
    return pages[needed].flatten(1, 2)
