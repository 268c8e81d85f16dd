"""The forms of a call whose host time `overhead` measures."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from .contenders.base import Contender
from .inputs import Inputs
from .points import Point
from .steps import Step

FORMS = {
    "dense": "one tensor for each of q, k and v",
    "lse": "the same, and the LSE is returned too",
    "packed": "packed sequences, with cu_seqlens",
    "decode": "one query, another number of keys at each call",
}
KINDS = {
    "fwd": "forward, no gradient",
    "fwd+tape": "forward, gradient recorded",
    "fwdbwd": "forward and backward",
}


def kinds_of(form: str) -> tuple[str, ...]:
    """What is measured of a form: nobody trains by decoding."""
    return ("fwd",) if form == "decode" else tuple(KINDS)


def point_of(form: str, point: Point) -> Point | None:
    """The point of a form, from the one that was asked for; None where packed sequences were asked
    for and the form has none."""
    if point.varlen:
        return None if form in ("dense", "decode") else point
    if form == "packed":
        total = point.batch * point.seqlen_q
        lengths = (point.seqlen_q,) * point.batch
        return replace(point, batch=1, seqlen_q=total, seqlen_k=total, lengths=lengths)
    if form == "decode":
        return replace(point, seqlen_q=1, causal=False, window=None)
    return point


def case_of(form: str, mode: str) -> str:
    """A form and a mode as `case` of a row."""
    return mode if form == "dense" else f"{form} {mode}"


def form_of(case: str) -> str:
    return case.rpartition(" ")[0] or "dense"


def mode_of(case: str) -> str:
    return case.rpartition(" ")[2]


def decoding(
    contender: Contender,
    point: Point,
    inputs: Inputs,
    prepared: Callable[[Callable[..., object]], Callable[..., object]],
) -> Step:
    """Calls with the first key, with the first two, and so on to all of them, and from the front
    again. The views of the cache are made before, since they are no part of the call."""
    native, _ = contender.native(point, inputs)
    call = prepared(native)
    caches = []
    for length in range(1, point.seqlen_k + 1):
        shorter = replace(inputs, k=inputs.k[:, :length], v=inputs.v[:, :length])
        caches.append(contender.native(point, shorter)[1].detached)
    turns = itertools.cycle(caches)
    return lambda: call(*next(turns))
