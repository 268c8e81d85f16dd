"""The parts of one of our calls without gradient, each alone: checks, choice, launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..arguments import EXTRAS, Arguments
from ..call import is_plain, key_of, plans
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
    kept = plans.get(key_of(name, q, v, options))
    runs = kept or plan
    op = runs.forward if runs.return_lse else runs.output
    if kept is None:  # the call is checked each time
        arguments = (*tensors, *plan.options, *call[-len(EXTRAS) :])
        return {
            "checks": lambda: checked(name, q, k, v, packing, with_defaults(name, options)),
            "choice": lambda: plan_for(name, call, given),
            "launch": lambda: op(*arguments),
        }
    return {
        "checks": lambda: is_plain(q, k, v, packing),
        "choice": lambda: plans.get(key_of(name, q, v, options)),
        "launch": lambda: op(q, k, v, *runs.options, *packing),
    }
