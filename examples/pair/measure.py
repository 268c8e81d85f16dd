"""Time and peak memory of triangle attention with each attention, and whether results agree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cute_attention.bench.memory import MIB, peak_bytes
from cute_attention.bench.steps import attempt
from cute_attention.timing import make_timer, median, turns

from .block import Attend, TorchAttention, TriangleAttention

_ROUNDS = 5

WHAT = (
    "attention, forward",
    "attention, forward and backward",
    "block, forward",
    "block, forward and backward",
)


@dataclass(frozen=True)
class Shape:
    channels: int
    heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    def block(self, attend: Attend) -> TriangleAttention:
        """The same weights whatever the attention."""
        torch.manual_seed(0)
        block = TriangleAttention(self.channels, self.heads, self.head_dim, attend)
        return block.to(self.device, self.dtype)

    def pair(self, residues: int) -> Tensor:
        generator = torch.Generator().manual_seed(residues)
        pair = torch.randn(residues, residues, self.channels, generator=generator)
        return pair.to(self.device, self.dtype).requires_grad_()


@dataclass
class Figures:
    """What was measured of one attention at one size."""

    residues: int
    what: str  # of WHAT
    name: str  # whose attention
    rounds: list[float] = field(default_factory=list)  # milliseconds
    peak: int = 0  # bytes beyond the inputs and parameters
    reason: str = ""  # why nothing was measured

    @property
    def ms(self) -> float:
        return median(self.rounds)

    @property
    def mib(self) -> float:
        return self.peak / MIB


def measure(
    attentions: Mapping[str, Attend], shape: Shape, residues: int, time_ms: float
) -> list[Figures]:
    """Everything of one size. Where PyTorch or the memory refuses, there is a reason instead."""
    found = []
    timer = make_timer(shape.device, time_ms)
    for what in WHAT:
        plans = {}
        for name, attend in attentions.items():
            figures = Figures(residues, what, name)
            found.append(figures)
            step = _step(what, attend, shape, residues)
            peak, figures.reason = attempt(peak_bytes, step, shape.device)
            if peak is not None:
                figures.peak = peak
                plans[name] = figures, step, timer.plan(step)
        entries = list(plans.values())
        for number in range(_ROUNDS):
            for index in turns(len(entries), number):
                figures, step, plan = entries[index]
                figures.rounds.append(median(timer.sample(step, plan)))
    return found


def _step(what: str, attend: Attend, shape: Shape, residues: int) -> Callable[[], object]:
    """What the clock surrounds. Leaves of a backward are all that a model learns or passes on."""
    block = shape.block(attend)
    pair = shape.pair(residues)
    if what.startswith("attention"):
        leaves = [t.detach().requires_grad_() for t in block.inputs(block.norm(pair))]
        forward = functools.partial(attend, *leaves)
    else:
        leaves = [pair, *block.parameters()]
        forward = functools.partial(block, pair)
    if what.endswith("backward"):
        grad_out = torch.ones_like(leaves[0])  # q and the pair have the shapes of the outputs
        return lambda: torch.autograd.grad(forward(), leaves, grad_out)
    return torch.no_grad()(forward)


@dataclass(frozen=True)
class Deviation:
    """How far a result lies from PyTorch's in float64, as a share of the largest exact value."""

    what: str
    ours: float
    theirs: float  # of the attention that ours is measured beside

    def within(self, dtype: torch.dtype) -> bool:
        """Whether our error is at most twice theirs, or a few roundings."""
        return self.ours <= max(2 * self.theirs, 4 * torch.finfo(dtype).eps)


def deviations(ours: Attend, theirs: Attend, shape: Shape, residues: int) -> list[Deviation]:
    """Of the output and of all gradients of the block."""
    exact = results(TorchAttention(SDPBackend.MATH), shape, residues, torch.float64)
    found = [results(attend, shape, residues, shape.dtype) for attend in (ours, theirs)]
    return [
        Deviation(
            what,
            *(((one[what] - value).abs().max() / value.abs().max()).item() for one in found),
        )
        for what, value in exact.items()
    ]


def results(attend: Attend, shape: Shape, residues: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and all gradients of a block, from the same numbers whatever the dtype."""
    block = shape.block(attend).to(dtype)
    pair = shape.pair(residues).detach().to(dtype).requires_grad_()
    out = block(pair)
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator).to(shape.device, shape.dtype).to(dtype)
    names, parameters = zip(*block.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, (pair, *parameters), grad_out)
    named = zip((f"gradient of {n}" for n in ("the pair", *names)), grads, strict=True)
    return {"output": out.detach(), **dict(named)}
