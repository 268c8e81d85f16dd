"""Arguments of flash-attn's functions that are tensors of integers, and the room of a table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checks import on_device, type_name
from ...errors import PageError


def check_room(name: str, label: str, table: Tensor, page_size: int, tokens: int) -> None:
    """Raise where a sequence of `tokens` has more pages than a row of the table."""
    if tokens > table.shape[1] * page_size:
        raise PageError(
            f"{name}: {label} has shape {list(table.shape)}, expected "
            f"[batch, at least {-(-tokens // page_size)}]: a sequence has {tokens} tokens, a page "
            f"holds {page_size}"
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


def int32(value: Any) -> Any:
    """`value`, in int32 where it is a tensor of int64, which flash-attn's callers pass too."""
    return value.int() if isinstance(value, Tensor) and value.dtype == torch.int64 else value
