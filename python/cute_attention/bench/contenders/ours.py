"""This package's backends, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cute_attention

from ..inputs import TORCH_DTYPES, Inputs
from ..parts import parts_of
from ..points import FEATURES, Point
from .base import OURS, LseOnRequest, needs_gpu, reason_for


class Ours(LseOnRequest):
    """`attention(..., backend=name)` and `attention_varlen`."""

    role = OURS
    features = frozenset(FEATURES)

    def _options(self, point: Point, **extra: Any) -> dict[str, Any]:
        return {
            "causal": point.causal,
            "window": tuple(point.window) if point.window else None,
            "softcap": point.softcap or None,
            "dropout_p": point.dropout,
            "deterministic": point.deterministic,
            "backend": self.name,
            **extra,
        }

    def parts(self, point: Point, inputs: Inputs) -> dict[str, Callable[[], object]]:
        """The parts of a call without gradient, each alone."""
        cu_seqlens, longest = inputs.cu_seqlens, inputs.max_seqlen
        name = "attention"
        packing: tuple[Any, ...] = ()
        if cu_seqlens is not None:
            name, packing = "attention_varlen", (cu_seqlens, cu_seqlens, longest, longest)
        options = self._options(point, return_lse=False) | _extras(inputs, learned=False)
        return parts_of(name, inputs.detached, packing, options)

    def _build(self, point: Point, inputs: Inputs, want_lse: bool) -> Any:
        options = self._options(point, return_lse=want_lse)
        learned = options | _extras(inputs, learned=True)
        constant = options | _extras(inputs, learned=False)
        cu_seqlens: Any = inputs.cu_seqlens
        longest = inputs.max_seqlen

        def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            chosen = learned if q.requires_grad else constant
            return cute_attention.attention(q, k, v, **chosen)

        def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            chosen = learned if q.requires_grad else constant
            return cute_attention.attention_varlen(
                q, k, v, cu_seqlens, cu_seqlens, longest, longest, **chosen
            )

        return dense if cu_seqlens is None else packed


def _extras(inputs: Inputs, learned: bool) -> dict[str, Any]:
    """The options that are tensors; without their gradients unless `learned`, as no gradient of q
    is recorded then either. Only those that are there: a call that names fewer options is checked
    faster."""
    tensors = {
        "alibi_slopes": inputs.alibi_slopes,
        "bias": inputs.bias,
        "sink": inputs.sink,
    }
    present = {name: x for name, x in tensors.items() if x is not None}
    return present if learned else {name: x.detach() for name, x in present.items()}


class Reference(Ours):
    name = "reference"
    title = "ours, reference"
    needs = "nothing"


class Auto(Ours):
    """What a caller gets who names no backend. On a Hopper GPU that is the forward of sm90 and the
    fastest backward there is."""

    name = "auto"
    title = "ours, auto"
    needs = "nothing"


class KernelBackend(Ours):
    """A backend of compiled kernels: it needs a GPU and rows."""

    half_on = frozenset({"cuda"})

    def missing(self, device: torch.device) -> str | None:
        gpu = needs_gpu(device)
        if gpu:
            return gpu
        try:
            rows = cute_attention.kernels()
        except Exception as error:  # such as a kernel library that does not load
            return f"the kernel libraries cannot be read: {reason_for(error)}"
        if any(row.arch == self.name for row in rows):
            return None
        return f"no {self.name} kernel is loaded"

    def refuses(self, point: Point, direction: str) -> str | None:
        """The reason that `explain` gives. It also refuses a call whose gradient would run on
        another backend, so that a figure under the name of a backend is of that backend alone."""
        try:
            answer = self._explain(point)
        except Exception as error:
            return reason_for(error)
        report = next(report for report in answer.forward if report.backend == self.name)
        if not report.serves:
            return "; ".join(report.reasons)
        if direction != "fwd" and answer.chosen_backward != self.name:
            return f"its backward would run on the {answer.chosen_backward} backend"
        return None

    def _explain(self, point: Point) -> cute_attention.Explanation:
        lead = (point.seqlen_q,) if point.varlen else (point.batch, point.seqlen_q)
        lead_k = (point.seqlen_k,) if point.varlen else (point.batch, point.seqlen_k)
        dtype = TORCH_DTYPES[point.dtype]

        def hollow(*shape: int) -> torch.Tensor:  # a tensor of this shape that takes no memory
            row = torch.empty(shape[-1], dtype=dtype, device="cuda")
            return row.expand(shape).requires_grad_()

        options = self._options(point)
        if point.alibi:
            options["alibi_slopes"] = torch.empty(point.heads, device="cuda")
        if point.bias:
            options["bias"] = hollow(1, point.heads, point.seqlen_q, point.seqlen_k)
        if point.sink:
            options["sink"] = torch.empty(point.heads, device="cuda", requires_grad=True)
        if point.varlen:
            cu_seqlens = torch.tensor((0, *point.lengths)).cumsum(0).to("cuda", torch.int32)
            options["cu_seqlens_q"] = options["cu_seqlens_k"] = cu_seqlens
            options["max_seqlen_q"] = options["max_seqlen_k"] = max(point.lengths)
        return cute_attention.explain(
            hollow(*lead, point.heads, point.head_dim),
            hollow(*lead_k, point.heads_kv, point.head_dim),
            hollow(*lead_k, point.heads_kv, point.head_dim_v),
            **options,
        )


class Sm90(KernelBackend):
    name = "sm90"
    title = "ours, sm90"
    needs = "a Hopper GPU and libcute_attention_sm90a.so"


class Sm80(KernelBackend):
    name = "sm80"
    title = "ours, sm80"
    needs = "an Ampere or newer GPU and libcute_attention_sm80.so"
