"""The tensors of a point, the same for every contender."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .points import Point

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

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

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
    return Inputs(leaves[0], leaves[1], leaves[2], grad_out, cu_seqlens, longest)
