"""How long a training step takes with each attention: ours, and PyTorch's by backend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .model import Attend, Shape
from .text import Text
from .training import Recipe, Trainer

_ROUNDS = 5
_TURN_SECONDS = 0.3  # of each attention in each round; one step at least
_WARM_UP_STEPS = 3

# PyTorch's fused kernels by device. On a GPU its unfused backend is left out: it is never the best,
# and its memory grows with the square of the context.
_BACKENDS = {
    "cuda": {
        "PyTorch, cuDNN": SDPBackend.CUDNN_ATTENTION,
        "PyTorch, FlashAttention-2": SDPBackend.FLASH_ATTENTION,
        "PyTorch, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {"PyTorch, blockwise": SDPBackend.FLASH_ATTENTION, "PyTorch, unfused": SDPBackend.MATH},
}


class TorchAttention:
    """PyTorch's own attention with one of its backends, for as many queries as keys: there its
    causal mask is ours. ALiBi and biases become a mask of numbers. Sinks it has none."""

    def __init__(self, backend: SDPBackend) -> None:
        self._backend = backend
        self._slopes: Tensor | None = None  # what the mask was made of
        self._bias: Tensor | None = None
        self._mask: Tensor | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Raises RuntimeError where the backend cannot do it."""
        mask = None
        if alibi_slopes is not None or bias is not None:
            mask = self._made_mask(q, alibi_slopes, bias)
        if mask is not None and mask.requires_grad and self._backend is SDPBackend.CUDNN_ATTENTION:
            raise RuntimeError("PyTorch's cuDNN backend has no gradient of a bias.")
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if self._backend is SDPBackend.EFFICIENT_ATTENTION:  # takes no groups of query heads
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        with sdpa_kernel(self._backend):
            out = F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, is_causal=mask is None, enable_gqa=True
            )
        return out.transpose(1, 2)

    def _made_mask(self, q: Tensor, slopes: Tensor | None, bias: Tensor | None) -> Tensor:
        """The mask of q's dtype, made once for the layers that share slopes or a bias."""
        length = q.shape[1]
        same = slopes is self._slopes and bias is self._bias
        if self._mask is None or self._mask.shape[-1] != length or not same:
            positions = torch.arange(length, device=q.device)
            distances = positions[:, None] - positions
            mask = bias if slopes is None else -slopes[None, :, None, None] * distances
            assert mask is not None
            self._mask = mask.masked_fill(distances < 0, -torch.inf).to(q.dtype)
            self._slopes, self._bias = slopes, bias
        return self._mask


def torch_attentions(device: torch.device) -> dict[str, Attend]:
    """PyTorch's attention by backend, under the names that the table shows."""
    return {name: TorchAttention(backend) for name, backend in _BACKENDS[device.type].items()}


@dataclass
class StepTime:
    """The time of a training step with one attention."""

    name: str
    rounds: list[float] = field(default_factory=list)  # seconds a step
    reason: str = ""  # why it was not measured

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)


def measure(
    attentions: Mapping[str, Attend], shape: Shape, text: Text, recipe: Recipe
) -> list[StepTime]:
    """Times steps of a new model with each attention, all in turn. One that PyTorch refuses has a
    reason instead of a time."""
    times = [StepTime(name) for name in attentions]
    trainers: dict[str, Trainer] = {}
    for entry in times:
        trainer = Trainer(attentions[entry.name], shape, text, recipe)
        try:
            _turn(trainer, _WARM_UP_STEPS)
        except RuntimeError as error:  # what PyTorch raises where a backend takes no such call
            entry.reason = str(error).splitlines()[0]
        else:
            trainers[entry.name] = trainer
    measured = [entry for entry in times if not entry.reason]
    # All take the same number of steps: that which fits the slowest into a turn.
    slowest = max(_turn(trainers[entry.name], 1) for entry in measured)
    steps = max(1, int(_TURN_SECONDS / slowest))
    for number in range(_ROUNDS):
        start = number % len(measured)  # so that none always follows the same one
        for entry in measured[start:] + measured[:start]:
            entry.rounds.append(_turn(trainers[entry.name], steps))
    return times


def _turn(trainer: Trainer, steps: int) -> float:
    """Seconds a step, over some steps."""
    start = time.perf_counter()
    for _ in range(steps):
        loss = trainer.step()
    loss.item()  # waits for a GPU
    return (time.perf_counter() - start) / steps


def best(times: Sequence[StepTime]) -> StepTime:
    return min((entry for entry in times if entry.rounds), key=lambda entry: entry.seconds)


def table(times: Sequence[StepTime]) -> str:
    """A Markdown table, the fastest first, and under it what was not measured."""
    ours = times[0].seconds
    lines = ["| attention | ms a step | over ours |", "|---|---|---|"]
    for entry in sorted((e for e in times if e.rounds), key=lambda e: e.seconds):
        figures = f"{1e3 * entry.seconds:.2f} | {entry.seconds / ours:.3f}"
        lines.append(f"| {entry.name} | {figures} |")
    lines += [f"not measured: {e.name}: {e.reason}" for e in times if e.reason]
    return "\n".join(lines)
