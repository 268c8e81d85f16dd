"""qkv and kv in one tensor: the parts, as views through which the gradient reaches the whole."""

from __future__ import annotations

from torch import Tensor

from ...checks import tensors


def parts_of(name: str, label: str, whole: Tensor, count: int, shape: str) -> tuple[Tensor, ...]:
    """The `count` tensors that lie in the dimension before heads and head_dim.

    Raises:
        TypeError: no tensor.
        ValueError: another number of dimensions than `shape` has, or of parts.
    """
    tensors(name, **{label: whole})
    if whole.dim() != shape.count(",") + 1 or whole.shape[-3] != count:
        raise ValueError(f"{name}: {label} has shape {list(whole.shape)}, expected {shape}")
    return whole.unbind(-3)
