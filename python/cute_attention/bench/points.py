"""Points: the shapes that are measured, and grids of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

DTYPES = ("fp16", "bf16", "fp32", "fp64")
# What may change scores and probabilities, in the order in which a call applies it.
FEATURES = ("softcap", "alibi", "bias", "sink", "dropout")


class Bounds(NamedTuple):
    """Query i sees keys i + offset - left .. i + offset + right; None is unbounded."""

    left: int | None
    right: int | None


@dataclass(frozen=True)
class Point:
    """One shape of attention, without the direction that is measured on it."""

    batch: int
    heads: int
    seqlen_q: int
    head_dim: int
    heads_kv: int = 0  # 0: as many as heads
    seqlen_k: int = 0  # 0: as long as seqlen_q
    head_dim_v: int = 0  # 0: as wide as head_dim
    dtype: str = "bf16"
    causal: bool = False
    window: Bounds | None = None
    softcap: float = 0.0
    alibi: bool = False  # the slopes of the ALiBi paper
    bias: bool = False  # learned, [1, heads, seqlen_q, seqlen_k]
    sink: bool = False  # learned, one logit per head
    dropout: float = 0.0  # share of the probabilities that is dropped
    deterministic: bool = False
    lengths: tuple[int, ...] = ()  # packed documents: batch is 1, seqlen_q is their sum
    packing: str = ""  # "total:mean:seed" where `lengths` came from pack_documents
    label: str = ""  # a name for people; points that differ in it alone are the same

    def __post_init__(self) -> None:
        for name, default in (
            ("heads_kv", self.heads),
            ("seqlen_k", self.seqlen_q),
            ("head_dim_v", self.head_dim),
        ):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, default)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        sizes = (self.batch, self.heads, self.heads_kv, self.seqlen_q, self.seqlen_k)
        if min(*sizes, self.head_dim, self.head_dim_v) < 1:
            raise ValueError(f"every size of a point must be at least 1, got {self}")
        if self.heads % self.heads_kv:
            raise ValueError(f"heads ({self.heads}) must be a multiple of {self.heads_kv=}")
        if self.lengths and (
            self.batch != 1 or not sum(self.lengths) == self.seqlen_q == self.seqlen_k
        ):
            raise ValueError("packed documents need batch 1 and seqlen_q = seqlen_k = their sum")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, expected 0 <= dropout < 1")
        if self.bias and self.lengths:
            raise ValueError("a bias is measured on dense calls, not on packed documents")

    @property
    def bounds(self) -> Bounds:
        """The window with `causal` folded in."""
        left, right = self.window or Bounds(None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return Bounds(left, right)

    @property
    def mask(self) -> str:
        left, right = self.bounds
        if left is None and right is None:
            return "full"
        if left is None and right == 0:
            return "causal"
        return f"window {'inf' if left is None else left},{'inf' if right is None else right}"

    @property
    def documents(self) -> tuple[tuple[int, int], ...]:
        """(seqlen_q, seqlen_k) of every sequence."""
        if self.lengths:
            return tuple((n, n) for n in self.lengths)
        return ((self.seqlen_q, self.seqlen_k),) * self.batch

    @property
    def varlen(self) -> bool:
        return bool(self.lengths)

    @property
    def features(self) -> tuple[str, ...]:
        """Those of FEATURES that a call of this point has."""
        return tuple(name for name in FEATURES if getattr(self, name))

    def plain(self) -> Point:
        """The point without FEATURES."""
        return replace(self, softcap=0.0, alibi=False, bias=False, sink=False, dropout=0.0)

    def key(self) -> Point:
        """What identifies the point in a result file."""
        return replace(self, label="")

    def shape_text(self) -> str:
        """`4x4096 h16 d128`, short enough for a table."""
        heads = f"h{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads else "")
        dim = f"d{self.head_dim}" + (
            f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""
        )
        if self.lengths:
            sizes = f"{len(self.lengths)} docs of {self.seqlen_q} (longest {max(self.lengths)})"
        elif self.seqlen_k != self.seqlen_q:
            sizes = f"{self.batch}x{self.seqlen_q}:{self.seqlen_k}"
        else:
            sizes = f"{self.batch}x{self.seqlen_q}"
        return f"{sizes} {heads} {dim}"

    def text(self) -> str:
        parts = [self.label, self.dtype, self.mask, self.shape_text()]
        for name in self.features:
            value = getattr(self, name)
            parts.append(name if value is True else f"{name} {value:g}")
        if self.deterministic:
            parts.append("deterministic")
        return " ".join(part for part in parts if part)

    def arguments(self) -> list[str]:
        """The command-line arguments of `speed` that select this point alone."""
        args = ["--heads", str(self.heads), "--head-dims", str(self.head_dim)]
        if self.packing:
            args += ["--packed", self.packing]
        elif self.lengths:
            args += ["--lengths", ",".join(map(str, self.lengths))]
        else:
            args += ["--batch", str(self.batch), "--seqlens", str(self.seqlen_q)]
        if self.seqlen_k != self.seqlen_q:
            args += ["--seqlen-k", str(self.seqlen_k)]
        if self.heads_kv != self.heads:
            args += ["--heads-kv", str(self.heads_kv)]
        if self.head_dim_v != self.head_dim:
            args += ["--head-dim-v", str(self.head_dim_v)]
        args += ["--masks", "causal" if self.causal else "full", "--dtypes", self.dtype]
        if self.window:
            args += ["--window", ",".join("inf" if x is None else str(x) for x in self.window)]
        for name in self.features:
            value = getattr(self, name)
            args += [f"--{name}"] if value is True else [f"--{name}", f"{value:g}"]
        if self.deterministic:
            args += ["--deterministic"]
        return args


def pack_documents(total: int, mean: int, seed: int = 0) -> tuple[int, ...]:
    """Document lengths that sum to `total`, drawn from an exponential distribution.

    Many short documents and a few long ones, as web text tokenises. Each is at least 16 tokens; the
    last one is cut so that the sum is exact. The same (total, mean, seed) gives the same documents
    everywhere.
    """
    if total < 1 or mean < 1:
        raise ValueError(f"packed documents need total and mean of at least 1, got {total}:{mean}")
    uniform = random.Random(seed)
    lengths: list[int] = []
    left = total
    while left > 0:
        drawn = max(16, round(-mean * math.log(1.0 - uniform.random())))
        lengths.append(min(drawn, left))
        left -= lengths[-1]
    return tuple(lengths)


def packed_point(packing: str, **shape: object) -> Point:
    """A point of packed documents from `total:mean[:seed]`."""
    fields = packing.split(":")
    if len(fields) not in (2, 3) or not all(field.isdigit() for field in fields):
        raise ValueError(f"--packed is {packing!r}, expected TOTAL:MEAN or TOTAL:MEAN:SEED")
    total, mean, seed = (*map(int, fields), 0)[:3]
    return lengths_point(
        pack_documents(total, mean, seed), packing=f"{total}:{mean}:{seed}", **shape
    )


def lengths_point(lengths: Sequence[int], **shape: object) -> Point:
    total = sum(lengths)
    return Point(batch=1, seqlen_q=total, lengths=tuple(lengths), **shape)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Grid:
    """Every combination of the given values. A batch of None becomes tokens / seqlen, and heads of
    None become hidden / head_dim, as in the FlashAttention papers."""

    head_dims: Sequence[int]
    masks: Sequence[str]
    seqlens: Sequence[int]
    dtypes: Sequence[str] = ("bf16",)
    tokens: int = 16384
    hidden: int = 2048
    batch: int | None = None
    heads: int | None = None

    def points(self) -> list[Point]:
        combinations = itertools.product(self.dtypes, self.head_dims, self.masks, self.seqlens)
        return [
            Point(
                batch=self.batch or max(1, self.tokens // seqlen),
                heads=self.heads or max(1, self.hidden // head_dim),
                seqlen_q=seqlen,
                head_dim=head_dim,
                dtype=dtype,
                causal=mask == "causal",
            )
            for dtype, head_dim, mask, seqlen in combinations
        ]
