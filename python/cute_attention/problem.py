"""What is asked and what runs: two records that all layers pass on. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Problem(NamedTuple):
    """Everything that decides which kernel serves a call, in the order of Problem of c_api.h.

    A window bound of -1 is unbounded. The lengths of packed sequences are those of the longest.
    The last three fields say what the number of splits depends on beside all others.
    The defaults of the sizes stand for a call of which only the kind is known: sizes decide between
    the rows of a backend, but not whether it serves.
    """

    direction: str = "forward"  # or "backward"
    dtype: str = "bf16"
    batch: int = 1
    seqlen_q: int = 1024
    seqlen_k: int = 1024
    heads: int = 8
    heads_kv: int = 8
    head_dim: int = 64
    head_dim_v: int = 64
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0  # 0 is none
    features: int = 0  # bits of `arguments.FEATURES`: Feature of c_api.h
    row: str = ""  # the name of the one kernel that may serve; "" for any
    device: torch.device | None = None
    total_q: int = -1  # rows of packed q; -1 where sequences are not packed
    num_splits: int = 0  # what the call asks for; 0: whatever is best
    batch_invariant: bool = False


class Backward(NamedTuple):
    """What runs for the gradient of a call: `op(grad_out, grad_lse, out, lse, deterministic, q, k,
    v, *options, ...)`."""

    op: Callable[..., Any]
    options: tuple[Any, ...]  # as in Plan


class Plan(NamedTuple):
    """What runs for a call: the ops, what they take beside tensors, and how the gradient is chosen.

    The ops are called as `forward(q, k, v, *options, ...)`, where further arguments follow in the
    order of `arguments.Arguments`.
    """

    problem: Problem  # of the kind of the call, forward
    requested: str  # the backend that was asked for when the plan was made, "auto" included
    backend: str  # that runs the forward
    forward: Callable[..., Any]  # returns the output and the LSE
    output: Callable[..., Any]  # returns the output alone
    options: tuple[Any, ...]  # `choices`, or one text for all of them that brief ops take
    choices: tuple[Any, ...]  # backend or kernel, scale, window_left, window_right, softcap
    backward_row: str  # the kernel that was asked for the backward, "" for any
    deterministic: bool  # what the call asks of the backward
    return_lse: bool
    brief_extras: int | None  # how many extras its brief ops take; None where its ops are not brief
    backward: list[Backward]  # one item once it is chosen, which the first backward does
