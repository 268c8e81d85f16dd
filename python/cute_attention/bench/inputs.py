"""The tensors of a point, the same for every contender."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .points import Point
from .visible import visible

TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

# What q is multiplied by, by the name of the inputs.
AMPLITUDES = {f"q-x{factor}": float(factor) for factor in (3, 5, 10)}

DISTRIBUTIONS = {
    "normal": "standard normal q, k, v: what layer norms produce",
    **{
        name: f"normal, q times {factor:g}: scores of standard deviation {factor:g}"
        for name, factor in AMPLITUDES.items()
    },
    "large-logit": "q and k times 4: scores of standard deviation 16, softmax close to one-hot",
    "outlier": "normal, and one value in 1000 ten times larger: what trained models show",
}


@dataclass(frozen=True)
class Inputs:
    """q, k, v are leaves that require gradients. A contender with another layout takes transposed
    views of them, not copies."""

    q: torch.Tensor  # [batch, seqlen_q, heads, head_dim], packed [total, heads, head_dim]
    k: torch.Tensor  # [batch, seqlen_k, heads_kv, head_dim]
    v: torch.Tensor  # [batch, seqlen_k, heads_kv, head_dim_v]
    grad_out: torch.Tensor  # [batch, seqlen_q, heads, head_dim_v]
    cu_seqlens: torch.Tensor | None  # int32 [documents + 1]
    max_seqlen: int
    alibi_slopes: torch.Tensor | None = None  # fp32 [heads]
    bias: torch.Tensor | None = None  # [1, heads, seqlen_q, seqlen_k], -inf at hidden keys
    sink: torch.Tensor | None = None  # fp32 [heads]

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def learned(self) -> tuple[torch.Tensor, ...]:
        """All tensors whose gradients a backward computes: q, k, v, and bias and sink where they
        are."""
        return *self.leaves, *(x for x in (self.bias, self.sink) if x is not None)

    def only(self, point: Point) -> Inputs:
        """These inputs without the tensors that another point of the same shape does not have."""
        return replace(
            self,
            alibi_slopes=self.alibi_slopes if point.alibi else None,
            bias=self.bias if point.bias else None,
            sink=self.sink if point.sink else None,
        )

    @property
    def detached(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q.detach(), self.k.detach(), self.v.detach()


def make_inputs(
    point: Point, device: torch.device, distribution: str = "normal", seed: int = 0
) -> Inputs:
    """Random tensors of a point; drawn in float32 and rounded to the point's dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    lead_q = (point.seqlen_q,) if point.varlen else (point.batch, point.seqlen_q)
    lead_k = (point.seqlen_k,) if point.varlen else (point.batch, point.seqlen_k)

    def draw(*shape: int, gain: float = 1.0) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=device).mul_(gain)
        if distribution == "outlier":
            rare = torch.rand(shape, generator=generator, device=device) < 1e-3
            x = torch.where(rare, 10.0 * x, x)
        return x.to(TORCH_DTYPES[point.dtype])

    gain = 4.0 if distribution == "large-logit" else 1.0
    gain_q = AMPLITUDES.get(distribution, gain)
    q = draw(*lead_q, point.heads, point.head_dim, gain=gain_q)
    k = draw(*lead_k, point.heads_kv, point.head_dim, gain=gain)
    v = draw(*lead_k, point.heads_kv, point.head_dim_v)
    grad_out = draw(*lead_q, point.heads, point.head_dim_v)
    cu_seqlens = None
    if point.varlen:
        lengths = torch.tensor((0, *point.lengths))
        cu_seqlens = lengths.cumsum(0).to(torch.int32).to(device)
    longest = max(point.lengths, default=point.seqlen_q)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    inputs = Inputs(leaves[0], leaves[1], leaves[2], grad_out, cu_seqlens, longest)
    return _with_features(inputs, point, generator)


def _with_features(inputs: Inputs, point: Point, generator: torch.Generator) -> Inputs:
    """The inputs with the tensors of the point's features; bias and sink are standard normal."""
    device = inputs.q.device
    slopes, bias, sink = None, None, None
    if point.alibi:
        heads = torch.arange(1, point.heads + 1, dtype=torch.float32, device=device)
        slopes = torch.exp2(-8 * heads / point.heads)
    if point.bias:
        shape = (1, point.heads, point.seqlen_q, point.seqlen_k)
        bias = torch.randn(shape, generator=generator, dtype=inputs.q.dtype, device=device)
        # PyTorch's kernels take a bias or a causal mask, not both, so the bias has the mask too.
        mask = visible(point.seqlen_q, point.seqlen_k, point.bounds, device)
        if mask is not None:
            bias.masked_fill_(~mask, -torch.inf)
        bias.requires_grad_()
    if point.sink:
        sink = torch.randn(point.heads, generator=generator, device=device).requires_grad_()
    return replace(inputs, alibi_slopes=slopes, bias=bias, sink=sink)
