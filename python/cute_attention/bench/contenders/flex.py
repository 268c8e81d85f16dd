"""FlexAttention, compiled: the Triton kernel that torch.compile writes for a mask given as a
function."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch._dynamo
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from ..inputs import Inputs
from ..points import Point
from .base import Attention, AttentionWithLse, Contender

# Each score function, each of them with and without gradients, is a graph of its own. Beyond its
# limit torch.compile would run FlexAttention uncompiled; its default is 8.
_GRAPHS = 64


class Flex(Contender):
    """Points that differ in their features alone are measured in turn, so what is compiled for them
    is kept together, until another shape comes or a point comes again."""

    name = "flex"
    title = "FlexAttention"
    features = frozenset({"softcap", "alibi", "bias", "sink"})
    _compiled: ClassVar[set[Point]] = set()
    needs = "torch.compile: Triton on a GPU, a C++ compiler on a CPU (forward alone)"

    def refuses(self, point: Point, direction: str) -> str | None:
        if point.deterministic and direction != "fwd":
            return "FlexAttention has no deterministic switch"
        return None

    def build(self, point: Point, inputs: Inputs) -> Attention:
        return self._build(point, inputs, want_lse=False)

    def build_with_lse(self, point: Point, inputs: Inputs) -> AttentionWithLse:
        return self._build(point, inputs, want_lse=True)

    def _build(self, point: Point, inputs: Inputs, want_lse: bool) -> Any:
        self._make_room(point)
        function: Any = _with_lse if want_lse or point.sink else flex_attention
        compiled: Any = torch.compile(function, dynamic=False)
        options: dict[str, Any] = {
            "block_mask": _block_mask(point, inputs),
            "enable_gqa": point.heads != point.heads_kv,
        }
        learned, constant = (options | _tensors(point, inputs, wanted) for wanted in (True, False))

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            chosen = learned if q.requires_grad else constant
            if point.varlen:
                q, k, v = q[None], k[None], v[None]
            result = compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **chosen)
            out, lse = result if want_lse or point.sink else (result, None)
            out = out.transpose(1, 2)
            if point.varlen:
                out, lse = out[0], None if lse is None else lse[0]
            return (out, lse) if want_lse else out

        return call

    def _make_room(self, point: Point) -> None:
        """Drops what is compiled for other shapes, and for this point where it was here before."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
        if point in self._compiled or any(p.plain() != point.plain() for p in self._compiled):
            torch.compiler.reset()
            self._compiled.clear()
        self._compiled.add(point)


def _with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE. FlexAttention has no sinks; one joins the denominator afterwards, by the
    LSE."""
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
    if sink is None:
        return out, aux.lse
    share = torch.sigmoid(aux.lse - sink[:, None])  # of the denominator that is not the sink's
    return (out * share[..., None]).to(out.dtype), torch.logaddexp(aux.lse, sink[:, None])


def _tensors(point: Point, inputs: Inputs, learned: bool) -> dict[str, Any]:
    """The options that hold tensors, with or without their gradients."""
    bias, sink = (x if x is None or learned else x.detach() for x in (inputs.bias, inputs.sink))
    found: dict[str, Any] = {"sink": sink} if sink is not None else {}
    if point.softcap or point.alibi or bias is not None:
        found["score_mod"] = _score_mod(point, inputs.alibi_slopes, bias)
    return found


def _score_mod(point: Point, slopes: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
    cap, offset = point.softcap, point.seqlen_k - point.seqlen_q
    one_sided = point.bounds.right is not None and point.bounds.right <= 0

    def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        if cap:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            distance = key - query - offset
            # No key lies behind its query under a causal mask, so that one needs no abs.
            score = score + slopes[head] * (distance if one_sided else -distance.abs())
        if bias is not None:
            score = score + bias[0, head, query, key]
        return score

    return score_mod


def _block_mask(point: Point, inputs: Inputs) -> BlockMask | None:
    """The mask as FlexAttention wants it; None where every key is visible."""
    left, right = point.bounds
    if point.mask == "full" and not point.varlen:
        return None
    device = inputs.q.device
    offset = point.seqlen_k - point.seqlen_q
    document = None
    if point.varlen:
        lengths = torch.tensor(point.lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = key >= 0
        if left is not None:
            seen = seen & (key >= query + offset - left)
        if right is not None:
            seen = seen & (key <= query + offset + right)
        if document is not None:
            seen = seen & (document[query] == document[key])
        return seen

    return create_block_mask(mask_mod, None, None, point.seqlen_q, point.seqlen_k, device=device)
