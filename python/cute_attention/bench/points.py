"""Points: the shapes that are measured, grids of them, and the named sets."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

DTYPES = ("fp16", "bf16", "fp32", "fp64")


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
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
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
        if self.softcap:
            args += ["--softcap", f"{self.softcap:g}"]
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


POWERS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = ("full", "causal")


def _gqa() -> list[Point]:
    """Causal attention with the heads, KV heads and head dims that released models have."""
    shapes = [
        ("Llama 3 8B", 1, 8192, 32, 8, 128, 128),
        ("Llama 3 70B", 1, 8192, 64, 8, 128, 128),
        ("Llama 3 70B", 2, 4096, 64, 8, 128, 128),
        ("Qwen3 0.6B", 4, 4096, 16, 8, 128, 128),
        ("Qwen3 30B-A3B", 1, 8192, 32, 4, 128, 128),
        ("Qwen3 235B-A22B", 1, 8192, 64, 4, 128, 128),
        ("DeepSeek-V3", 1, 4096, 128, 128, 192, 128),
        ("DeepSeek-V3", 1, 8192, 128, 128, 192, 128),
        ("MQA", 2, 8192, 16, 1, 128, 128),
    ]
    return [
        Point(batch, heads, seqlen, dim, heads_kv, head_dim_v=dim_v, causal=True, label=label)
        for label, batch, seqlen, heads, heads_kv, dim, dim_v in shapes
    ]


def _varlen(total: int, means: Iterable[int], heads: int, head_dim: int) -> list[Point]:
    return [
        packed_point(
            f"{total}:{mean}:0", heads=heads, head_dim=head_dim, causal=True, label=f"mean {mean}"
        )
        for mean in means
    ]


def named_set(name: str) -> list[Point]:
    """The points of a named set, in bf16."""
    if name == "paper":
        return Grid((64, 128, 256), MASKS, POWERS).points()
    if name == "short":
        seqlens = (128, 256, 512, 1024)
        return [
            point
            for tokens in (4096, 16384)
            for point in Grid((64, 128), MASKS, seqlens, tokens=tokens).points()
        ]
    if name == "gqa":
        return _gqa()
    if name == "varlen":
        return _varlen(32768, (512, 2048, 8192), heads=16, head_dim=128)
    if name == "ladder":
        return Grid((128,), ("causal",), POWERS, batch=1, heads=16).points()
    if name == "cpu":
        return Grid((64,), MASKS, (128, 256, 512), tokens=512, hidden=256).points()
    raise ValueError(f"no set is named {name!r}: the sets are {', '.join(SETS)}")


SETS = {
    "paper": "16k tokens, hidden 2048; dims 64, 128, 256; full, causal; 512 to 16k (36 points)",
    "short": "sequences of 128 to 1024 at 4k and 16k tokens, head dims 64 and 128 (32 points)",
    "gqa": "the attention of Llama 3 8B and 70B, Qwen3, DeepSeek-V3 (192/128), and one MQA shape",
    "varlen": "32k tokens of packed documents, exponential lengths of mean 512, 2048 and 8192",
    "ladder": "batch 1, 16 heads of 128, causal, 512 to 16k: how cost grows with the sequence",
    "cpu": "tiny: 512 tokens, hidden 256, head dim 64; the default without a GPU",
}
