"""The training loop, the loss curve it leaves, and the comparison of two curves."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .model import GPT, Attend, Shape
from .text import Text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HELD_OUT_SEQUENCES = 32
_HELD_OUT_TIMES = 10  # measured before, after, and so often in between
_WARM_UP = 0.05  # share of the steps
_SMALLEST_RATE = 0.1  # of the learning rate, at the end
_END = 0.05  # share of the steps whose mean is the training loss at the end


@dataclass(frozen=True)
class Recipe:
    steps: int
    batch: int  # sequences in a step
    learning_rate: float
    seed: int
    device: torch.device
    dtype: torch.dtype  # of the matrix products and of attention; parameters are float32

    def rate(self, step: int) -> float:
        """Share of the learning rate at a step: linear warm-up, then half a cosine."""
        warm_up = max(1, round(self.steps * _WARM_UP))
        if step < warm_up:
            return (step + 1) / warm_up
        share = (step - warm_up) / max(1, self.steps - warm_up)
        return _SMALLEST_RATE + (1 - _SMALLEST_RATE) * 0.5 * (1 + math.cos(math.pi * share))

    def autocast(self) -> torch.autocast:
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=enabled)


@dataclass(frozen=True)
class Run:
    """A trained model and how it got there. Losses are in nats per byte."""

    name: str  # whose attention
    model: GPT
    losses: list[float]  # of every step, before its update
    held_out: list[tuple[int, float]]  # (updates done, loss)
    tokens_per_second: float  # of the training steps; the held-out losses are not in the time
    seconds: float

    @property
    def end(self) -> float:
        """Mean training loss of the last steps."""
        last = self.losses[-max(1, round(len(self.losses) * _END)) :]
        return sum(last) / len(last)


class Trainer:
    """A new model and what updates it: for the same seed the same weights and batches."""

    def __init__(self, attend: Attend, shape: Shape, text: Text, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        self.model = GPT(shape, attend).to(recipe.device)
        self._recipe = recipe
        self._optimizer = _optimizer(self.model, recipe)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, recipe.rate)
        self._batches = text.batches(recipe.batch, shape.context, recipe.seed)

    def step(self) -> Tensor:
        """One update of the weights; the loss before it."""
        loss = _loss(self.model, next(self._batches), self._recipe)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return loss.detach()


def train(name: str, attend: Attend, shape: Shape, text: Text, recipe: Recipe) -> Run:
    """Trains a new model and records its losses."""
    trainer = Trainer(attend, shape, text, recipe)
    model = trainer.model
    held_out = text.held_out_batch(_HELD_OUT_SEQUENCES, shape.context)
    losses = torch.zeros(recipe.steps, device=recipe.device)
    measured = [(0, _held_out_loss(model, held_out, recipe))]
    every = max(1, recipe.steps // _HELD_OUT_TIMES)
    seconds = 0.0
    with _bar(name, recipe.steps) as bar:
        for first in range(0, recipe.steps, every):
            last = min(first + every, recipe.steps)
            start = time.perf_counter()
            for step in range(first, last):
                losses[step] = trainer.step()
                bar.update()
            losses[last - 1].item()  # waits for a GPU
            seconds += time.perf_counter() - start
            measured.append((last, _held_out_loss(model, held_out, recipe)))
            bar.set_postfix_str(f"held-out loss {measured[-1][1]:.3f}")
    tokens = recipe.steps * recipe.batch * shape.context
    return Run(name, model, losses.tolist(), measured, tokens / seconds, seconds)


def _optimizer(model: GPT, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; gains of norms do not decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def _loss(model: GPT, sequences: Tensor, recipe: Recipe) -> Tensor:
    """Mean cross-entropy of each byte given those before it; sequences `[batch, context + 1]`."""
    sequences = sequences.to(recipe.device, non_blocking=True)
    with recipe.autocast():
        logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())


@torch.no_grad()
def _held_out_loss(model: GPT, sequences: Tensor, recipe: Recipe) -> float:
    model.eval()  # without dropout
    loss = _loss(model, sequences, recipe).item()
    model.train()
    return loss


def _bar(name: str, steps: int) -> tqdm:
    """A progress bar; where it lands in a file, an update of it now and then."""
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=steps, desc=name, unit="step", mininterval=interval, dynamic_ncols=True)


@dataclass(frozen=True)
class Deviation:
    """How far apart two loss curves lie, in nats per byte."""

    mean: float
    largest: float

    def within(self, tolerance: Deviation) -> bool:
        return self.mean <= tolerance.mean and self.largest <= tolerance.largest


def deviation(one: Run, other: Run) -> Deviation:
    apart = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    return Deviation(sum(apart) / len(apart), max(apart))
