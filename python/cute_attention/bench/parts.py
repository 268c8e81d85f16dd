"""The parts of one of our calls without gradient, each alone: checks, choice, launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..arguments import EXTRAS, Arguments
from ..call import apart, is_plain, key_of, plans, settled
from ..checked import checked
from ..dispatch.plans import plan_for
from ..options import with_defaults

PARTS = {
    "checks": "checks",
    "choice": "choice",
    "launch": "op and launch",
}


def parts_of(
    name: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    packing: tuple[Any, ...],
    options: dict[str, Any],
) -> dict[str, Callable[[], object]]:
    """What a call does, by the names of `PARTS`, on the way that it takes once it was made before.

    Args:
        name: "attention" or "attention_varlen".
        tensors: q, k and v.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; empty where dense.
        options: of the call.
    """
    q, k, v = tensors
    given = with_defaults(name, options)
    call: Arguments = checked(name, q, k, v, packing, dict(given))
    plan = plan_for(name, call, given)
    extras, kind = apart(packing, options)
    kept = plans.get(key_of(name, q, v, kind))
    runs = kept or plan
    op = runs.forward if runs.return_lse else runs.output
    if kept is None:  # the call is checked each time
        arguments = (*tensors, *plan.options, *call[-len(EXTRAS) :])
        return {
            "checks": lambda: checked(name, q, k, v, packing, with_defaults(name, options)),
            "choice": lambda: plan_for(name, call, given),
            "launch": lambda: op(*arguments),
        }
    ready = settled(extras, q.device) if len(extras) > len(packing) else extras
    return {
        "checks": lambda: is_plain(q, k, v, extras),
        "choice": lambda: plans.get(key_of(name, q, v, apart(packing, options)[1])),
        "launch": lambda: op(q, k, v, *runs.options, *ready),
    }
