"""Named cases of attention, their tensors, and functions that compute them by both references: the
direct formula, and the blockwise functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attention import attention_reference, attention_varlen_reference
from cute_attention.arguments import Arguments
from cute_attention.semantics.blockwise import blockwise_backward, blockwise_forward

SEED = torch.tensor([-0x0123456789ABCDEF])


@dataclass(frozen=True)
class Case:
    name: str
    batch: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 51
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: str = ""  # the axes of the slopes: "heads" or "batch, heads"
    bias: str = ""  # the axes of the bias, such as "b h q k"; a 1 stands for a broadcast axis
    bias_hides: float = 0.0  # the share of the bias that is -inf
    sink: bool = False
    dropout_p: float = 0.0
    magnitude: float = 1.0  # q is multiplied by this
    offset: float = 0.0  # is added to every score, through the first column of q and of k

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("plain"),
    Case("empty_batch", batch=0, bias="b h q k", sink=True),
    Case("one_token", seqlen_q=1, seqlen_k=1),
    Case("decode", seqlen_q=1, seqlen_k=300, heads=4, heads_kv=1),
    Case("no_queries", seqlen_q=0),
    Case("no_keys", seqlen_k=0),
    Case("no_keys_sink", seqlen_k=0, sink=True),
    Case("ragged", seqlen_q=129, seqlen_k=257),
    Case("one_column", head_dim=1, head_dim_v=1),
    Case("gqa", heads=6, heads_kv=2),
    Case("mqa", heads=5, heads_kv=1, causal=True),
    Case("narrow_values", head_dim=24, head_dim_v=8),
    Case("wide_values", head_dim=8, head_dim_v=40),
    Case("causal", causal=True),
    Case("causal_square", seqlen_q=64, seqlen_k=64, causal=True),
    Case("causal_q_longer", seqlen_q=90, seqlen_k=33, causal=True),
    Case("causal_q_longer_sink", seqlen_q=90, seqlen_k=33, causal=True, sink=True),
    Case("window", window=(7, 5)),
    Case("window_left", window=(9, None)),
    Case("window_right", window=(None, 4)),
    Case("window_diagonal", window=(0, 0), seqlen_q=51),
    Case("window_causal", window=(9, 30), causal=True),
    Case("window_hides_most_keys", window=(2, 0), seqlen_q=5, seqlen_k=90),
    Case("window_rows_without_keys", window=(3, 2), seqlen_q=80, seqlen_k=20),
    Case("scale", scale=-0.37),
    Case("scale_zero", scale=0.0),
    Case("softcap", softcap=1.5, causal=True),
    Case("alibi", alibi="heads"),
    Case("alibi_batch_gqa", alibi="batch, heads", heads=6, heads_kv=2, causal=True),
    Case("bias", bias="b h q k"),
    Case("bias_gqa", bias="b h q k", heads=6, heads_kv=2),
    Case("bias_rows_and_keys", bias="q k", causal=True),
    Case("bias_keys", bias="b 1 1 k"),
    Case("bias_rows", bias="1 h q 1"),
    Case("bias_heads", bias="h 1 1", heads=6, heads_kv=2),
    Case("bias_batch", bias="b 1 1 1"),
    Case("bias_one", bias="1"),
    Case("bias_hides", bias="b h q k", bias_hides=0.4),
    Case("bias_hides_all", bias="b 1 q k", bias_hides=1.0),
    Case("bias_hides_rows", bias="b h q 1", bias_hides=0.5),
    Case("bias_hides_rows_sink", bias="b h q 1", bias_hides=0.5, sink=True),
    Case("sink", sink=True),
    Case("sink_gqa_causal", sink=True, heads=6, heads_kv=2, causal=True),
    Case("dropout", dropout_p=0.3),
    Case("dropout_gqa_causal", dropout_p=0.3, heads=6, heads_kv=2, causal=True),
    Case("dropout_all", dropout_p=1.0, sink=True),
    Case("small_lse", seqlen_q=64, seqlen_k=192, offset=-200.0, causal=True),
    Case("large_lse", seqlen_q=64, seqlen_k=192, offset=200.0, window=(17, 3)),
    Case(
        "everything", heads=6, heads_kv=2, head_dim_v=8, causal=True, window=(20, None), scale=0.3,
        softcap=2.0, alibi="batch, heads", bias="b 1 q k", sink=True, dropout_p=0.2,
    ),
]  # fmt: skip
HUGE_LOGITS = Case("huge_logits", magnitude=1000.0, causal=True)


@dataclass
class Inputs:
    """The tensors of a case. They are not contiguous; those with a gradient have requires_grad."""

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None
    bias: Tensor | None
    sink: Tensor | None

    @property
    def differentiable(self) -> list[Tensor]:
        return [t for t in (self.q, self.k, self.v, self.bias, self.sink) if t is not None]

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values rounded to `dtype`. Sink and slopes become float64 if `dtype` is float64,
        and float32 otherwise."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def cast(t: Tensor | None, dtype: torch.dtype, grad: bool = True) -> Tensor | None:
            return None if t is None else t.detach().to(dtype).requires_grad_(grad)

        q, k, v, bias = (cast(t, dtype) for t in (self.q, self.k, self.v, self.bias))
        assert q is not None and k is not None and v is not None
        slopes, sink = cast(self.alibi_slopes, wide, grad=False), cast(self.sink, wide)
        return Inputs(q, k, v, slopes, bias, sink)


def strided(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal values, stored so that no two axes are contiguous together: the heads lie outside of
    the rows, and there are gaps between rows."""
    *outer, rows, heads, dim = shape
    return torch.randn(*outer, heads, rows, dim + 3, dtype=dtype)[..., :dim].transpose(-3, -2)


def make_inputs(case: Case) -> Inputs:
    """The inputs of a case in float64. A case always gets the same numbers."""
    torch.manual_seed(len(case.name))
    q = strided(case.batch, case.seqlen_q, case.heads, case.head_dim) * case.magnitude
    k = strided(case.batch, case.seqlen_k, case.heads_kv, case.head_dim)
    v = strided(case.batch, case.seqlen_k, case.heads_kv, case.head_dim_v)
    if case.offset:
        q[..., 0] = case.offset * case.head_dim**0.5
        k[..., 0] = 1.0
    sizes = {"b": case.batch, "h": case.heads, "q": case.seqlen_q, "k": case.seqlen_k, "1": 1}
    bias = slopes = None
    if case.bias:
        shape = [sizes[axis] for axis in case.bias.split()]
        bias = torch.randn(shape[::-1], dtype=torch.float64).permute(*range(len(shape))[::-1])
        bias = bias.masked_fill(torch.rand(shape) < case.bias_hides, -torch.inf).requires_grad_()
    if case.alibi:
        slopes = torch.rand(sizes["b"], case.heads, dtype=torch.float64)
        slopes = slopes if case.alibi.startswith("batch") else torch.rand(case.heads).double()
    sink = torch.randn(case.heads, dtype=torch.float64).requires_grad_() if case.sink else None
    leaves = [t.requires_grad_() for t in (q, k, v)]
    return Inputs(*leaves, slopes, bias, sink)


def options(case: Case, inputs: Inputs) -> dict[str, Any]:
    """Keyword arguments of the direct formula."""
    return {
        "causal": case.causal,
        "window": case.window,
        "scale": case.scale,
        "softcap": case.softcap,
        "alibi_slopes": inputs.alibi_slopes,
        "bias": inputs.bias,
        "sink": inputs.sink,
        "dropout_p": case.dropout_p,
        "dropout_seed": SEED,
    }


def make_call(
    case: Case,
    inputs: Inputs,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    seed: Tensor = SEED,
) -> Arguments:
    """The checked arguments of a case."""
    left, right = case.window or (None, None)
    return Arguments(
        inputs.q,
        inputs.k,
        inputs.v,
        "reference",
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap or 0.0,
        window_left=-1 if left is None else left,
        window_right=0 if case.causal else (-1 if right is None else right),
        cu_seqlens_q=cu_seqlens[0] if cu_seqlens else None,
        cu_seqlens_k=cu_seqlens[1] if cu_seqlens else None,
        bias=inputs.bias,
        alibi_slopes=inputs.alibi_slopes,
        sink=inputs.sink,
        dropout_p=case.dropout_p,
        dropout_seed=seed,
        max_seqlen_q=case.seqlen_q,
        max_seqlen_k=case.seqlen_k,
    )


def make_grads(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the output and the LSE, not contiguous. The same shapes always get the same
    numbers."""
    torch.manual_seed(1)
    grad_lse = torch.randn(*lse.shape[:-1], 2 * lse.shape[-1], dtype=torch.float64)[..., ::2]
    return strided(*out.shape).to(out.dtype), grad_lse.to(lse.dtype)


def run_direct(
    case: Case,
    inputs: Inputs,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    grads_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = make_grads,
) -> dict[str, Tensor]:
    """Output, LSE and gradients by the direct formula. `grads_of` makes the gradients of the output
    and the LSE."""
    attend: Callable[..., Any] = attention_reference
    if cu_seqlens is not None:
        attend = attention_varlen_reference
    tensors = (inputs.q, inputs.k, inputs.v, *(cu_seqlens or ()))
    out, lse = attend(*tensors, **options(case, inputs), return_lse=True)
    grads = torch.autograd.grad([out, lse], inputs.differentiable, grads_of(out, lse))
    return name_results(inputs, out.detach(), lse.detach(), *grads)


def run_blockwise(
    case: Case,
    inputs: Inputs,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    grads_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = make_grads,
) -> dict[str, Tensor]:
    """The same results by the blockwise functions."""
    call = make_call(case, inputs, cu_seqlens)
    out, lse = blockwise_forward(call)
    needs = (inputs.bias is not None, inputs.sink is not None)
    grads = blockwise_backward(*grads_of(out, lse), out, lse, call, needs)
    assert [grad is not None for grad in grads[3:]] == list(needs)
    return name_results(inputs, out, lse, *(grad for grad in grads if grad is not None))


def name_results(inputs: Inputs, out: Tensor, lse: Tensor, *grads: Tensor) -> dict[str, Tensor]:
    names = ["dq", "dk", "dv"]
    names += ["dbias"] * (inputs.bias is not None) + ["dsink"] * (inputs.sink is not None)
    return {"out": out, "lse": lse, **dict(zip(names, grads, strict=True))}
