"""How the ops run on DTensors: split by batch or by heads, without a word between the devices.

    batch       everything but what all batch entries share: sinks, slopes and biases that broadcast
    heads       where each device gets whole groups of query heads with their KV head
    neither     what is split otherwise is gathered first, and so is a call with dropout, whose bits
                depend on the place of batch entry and head in the whole

The gradient of what all batch entries share is a sum over them, and so over the devices. Packed
sequences are split by heads alone; their cu_seqlens are replicated.

PyTorch's DTensor takes most of a second to import, so the rules are registered when somebody else
has imported it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from ..arguments import GRADIENTS, NAMES, Arguments, is_positive
from .schema import KERNELS, REFERENCE, RESULTS, backward_arguments, forward_arguments

_MODULE = "torch.distributed.tensor"
_registered = False


def register_rules() -> None:
    """Tells DTensor the rules, once it is there and unless it knows them."""
    global _registered
    if _registered or _MODULE not in sys.modules:
        return
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # while DTensor itself is being imported
        return
    families: tuple[Any, ...] = (KERNELS, REFERENCE)  # of OpOverloads
    for ops in families:
        register_sharding(ops.forward)(_rule(forward_arguments, ("out", "lse")))
        register_sharding(ops.output)(_rule(forward_arguments, ("out",)))
        register_sharding(ops.backward)(
            _rule(lambda *call: backward_arguments(*call)[1], tuple(f"d{n}" for n in GRADIENTS))
        )
    _registered = True


def _rule(
    arguments: Callable[[tuple[Any, ...], dict[str, Any]], Arguments], results: tuple[str, ...]
) -> Callable[..., Any]:
    """The rule of an op: what it may return, and for what it takes.

    Args:
        arguments: reads the forward's arguments from those of the op.
        results: the names of what the op returns.
    """
    is_backward = len(results) == len(GRADIENTS)
    names = (*RESULTS, *NAMES) if is_backward else NAMES

    def rule(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        call = arguments(args, kwargs)
        given = {
            name: value
            for name, value in (*zip(names, args, strict=False), *kwargs.items())
            if hasattr(value, "placements")
        }
        return [
            ([placed[name] for name in results], [placed[name] for name in given])
            for placed in _placements(call)
        ]

    return rule


def _placements(call: Arguments) -> list[dict[str, Any]]:
    """The ways to place what an op takes and returns along one dimension of the mesh, by name."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    everywhere: dict[str, Any] = {
        name: Replicate() for name in (*RESULTS, *NAMES, "dbias", "dsink")
    }
    ways = [everywhere]
    if not is_positive(call.dropout_p):
        if not call.packed:
            shared = {"dbias": Partial(), "dsink": Partial()}
            ways.append(everywhere | shared | _split(call, 0, 0, 0, Shard))
        if _heads_divide(call):
            dim = 1 if call.packed else 2
            ways.append(everywhere | {"dbias": Partial()} | _split(call, dim, dim - 1, 1, Shard))
    return [
        way
        | {"grad_out": way["out"], "grad_lse": way["lse"]}
        | {f"d{name}": way[name] for name in "qkv"}
        | _unless_given(call, Replicate())
        for way in (each | {"out": each["q"]} for each in ways)
    ]


def _split(call: Arguments, dim: int, dim_lse: int, dim_bias: int, shard: Any) -> dict[str, Any]:
    """What is split along the batch or the heads: dimension `dim` of q, k and v."""
    split: dict[str, Any] = {name: shard(dim) for name in "qkv"}
    split["lse"] = shard(dim_lse)
    by_heads = dim > 0
    if call.bias is not None and call.bias.shape[dim_bias] > 1:
        split["bias"] = split["dbias"] = shard(dim_bias)
    if call.alibi_slopes is not None and (by_heads or len(call.alibi_slopes.shape) == 2):
        split["alibi_slopes"] = shard(len(call.alibi_slopes.shape) - 1 if by_heads else 0)
    if by_heads:
        split["sink"] = split["dsink"] = shard(0)
    return split


def _unless_given(call: Arguments, placement: Any) -> dict[str, Any]:
    """The gradients of arguments that a call lacks are empty tensors."""
    return {f"d{n}": placement for n in ("bias", "sink") if getattr(call, n) is None}


def _heads_divide(call: Arguments) -> bool:
    """Whether the parts of the mesh along which heads are split get whole groups of heads: not
    where they are not split at all, since nothing is gained by that."""
    dim = 1 if call.packed else 2
    mesh: Any = call.q.mesh  # type: ignore[attr-defined]
    tensors: tuple[Any, ...] = (call.q, call.k, call.v)
    parts = math.prod(
        mesh.size(axis)
        for axis in range(mesh.ndim)
        if any(tensor.placements[axis].is_shard(dim) for tensor in tensors)
    )
    return parts > 1 and call.k.shape[dim] % parts == 0
