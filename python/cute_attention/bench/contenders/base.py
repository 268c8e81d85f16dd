"""What a contender is: a name, why it cannot run here, and a callable for one point."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..inputs import Inputs
from ..points import Point

# (q, k, v) -> out, in the layout of the inputs: [batch, seqlen, heads, head_dim] or packed
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (q, k, v) -> (out, lse), lse as in cute_attention: [batch, heads, seqlen_q] or [heads, total]
AttentionWithLse = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]

OURS = "ours"  # a backend of this package: the numerator of every ratio
BUILD = "build"  # a backend of this package in another build of it
PEER = "peer"  # a fused kernel of somebody else: the best of them is the denominator
BASELINE = "baseline"  # what one would write without a fused kernel


class CannotRun(Exception):
    """A contender cannot do this point. The message says why, and becomes the reason in the row."""


class Contender:
    """One implementation of attention. Subclasses say what it needs and how it is called."""

    name: str
    title: str
    role: ClassVar[str] = PEER
    needs: ClassVar[str] = ""  # for the help
    function: ClassVar[str] = ""  # what is called, where a refusal should name it; else the title
    features: ClassVar[frozenset[str]] = frozenset()  # those of FEATURES that it can do
    half_on: ClassVar[frozenset[str]] = frozenset()  # devices where it computes fp16 and bf16 alone

    in_build: str = ""  # LABEL=FOLDER of another build that it calls (`--build`)

    @property
    def asked_as(self) -> str:
        """Its name in `--contenders`."""
        return self.name

    def missing(self, device: torch.device) -> str | None:
        """Why this machine cannot run it at all, or None."""
        return None

    def lacks(self, point: Point) -> str | None:
        """Which features of the point it cannot do, or None."""
        absent = [name for name in point.features if name not in self.features]
        return f"{self.function or self.title} has no {', no '.join(absent)}" if absent else None

    def refuses(self, point: Point, direction: str) -> str | None:
        """Why it cannot do this point, as far as is known without trying, or None."""
        return None

    def build(self, point: Point, inputs: Inputs) -> Attention:
        """The callable for a point. All that depends on the shape alone (masks, offsets) is made
        here."""
        raise NotImplementedError

    def native(self, point: Point, inputs: Inputs) -> tuple[Attention, Inputs]:
        """The contender's own function, and the inputs in its own layout: `overhead` measures the
        host's time of this call and must not measure a conversion."""
        return self.build(point, inputs), inputs

    def native_with_lse(self, point: Point, inputs: Inputs) -> tuple[AttentionWithLse, Inputs]:
        """`native` that returns the LSE too."""
        return self.build_with_lse(point, inputs), inputs

    def build_with_lse(self, point: Point, inputs: Inputs) -> AttentionWithLse:
        raise CannotRun("its interface returns no LSE")

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """A context that is entered around all calls and outside the clock; it forces a backend."""
        return contextlib.nullcontext()


class LseOnRequest(Contender):
    """A contender with one function, which also returns the LSE if it is asked to."""

    def _build(self, point: Point, inputs: Inputs, want_lse: bool) -> Any:
        """The callable for a point: an Attention, or an AttentionWithLse."""
        raise NotImplementedError

    def build(self, point: Point, inputs: Inputs) -> Attention:
        call: Attention = self._build(point, inputs, want_lse=False)
        return call

    def build_with_lse(self, point: Point, inputs: Inputs) -> AttentionWithLse:
        call: AttentionWithLse = self._build(point, inputs, want_lse=True)
        return call


def needs_gpu(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs an NVIDIA GPU"


def reason_for(error: BaseException) -> str:
    """An exception as the reason in a row: one line."""
    if isinstance(error, CannotRun):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."
