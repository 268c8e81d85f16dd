"""Random legal calls: each is a function of one number, its seed.

`python tests/random_calls.py --seconds 60` makes as many as it can, in several processes, and
prints those that are wrong, each as a line, with the command that repeats it. `draw` decides what a
call looks like, `random_tensors.py` and `random_cache.py` make its tensors, `random_ways.py` makes
it by one of the ways that there are, `random_checks.py` compares results with the formula.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

LENGTHS = (
    0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 47, 63, 64, 65, 79, 80, 81, 95, 96, 97, 127, 128,
    129, 160, 175, 176, 177, 191, 192, 193, 211, 255, 256, 257, 320, 383, 384, 385, 511, 513,
    700, 1023, 1024, 1025, 1409, 2047, 2049,
)  # fmt: skip
GROUPS = (1, 1, 2, 3, 4, 5, 7, 8, 16, 64)
NUMBERS = {  # what q and k are made of, and how often
    "normal": 8, "wide": 1, "huge": 1, "constant": 1, "tiny": 1, "one_key": 2, "shifted": 1,
    "zero": 1, "outliers": 1, "growing": 1, "large": 1,
}  # fmt: skip
LAYOUTS = (
    "contiguous", "contiguous", "heads_first", "sliced", "sliced", "odd_slice", "one_batch",
    "one_head", "one_row", "every_other", "columns_apart", "one_later",
)  # fmt: skip
KINDS = {"dense": 10, "packed": 6, "cache": 4, "merge": 1}
# How a call is made: by `attention` and its relatives, or by a library's names for them, compiled,
# or, on a GPU alone, in a stream beside others and in a CUDA graph. How often of 100.
WAYS = {"flash_attn": 8, "flash_attn_interface": 8, "compiled": 1, "stream": 5, "graph": 5}
GPU_WAYS = ("stream", "graph")
ON_CPU = tuple(way for way in WAYS if way not in GPU_WAYS)
BIASES = ("b h q k", "h q k", "q k", "k", "b k", "h k", "q", "b q", "b h", "h", "", "b q k")


@dataclass(frozen=True)
class Limits:
    """What a machine has: how many scores a call may have, and the rows it is for."""

    scores: int = 3_000_000
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    dims: tuple[int, ...] = tuple(range(8, 257, 8))
    kinds: tuple[str, ...] = tuple(KINDS)
    ways: tuple[str, ...] = ON_CPU
    poison: tuple[str, ...] = ("bias", "rows")  # kernels read rows that a mask hides from everybody


@dataclass(frozen=True)
class Drawn:
    """What a call looks like. `lengths` are (queries, keys) of each sequence."""

    seed: int
    kind: str
    dtype: str
    lengths: tuple[tuple[int, int], ...]
    heads: int
    heads_kv: int
    dim: int
    dim_v: int
    numbers: str
    layouts: tuple[str, ...] = ("contiguous",) * 4  # of q, k, v and the gradient of the output
    options: dict[str, Any] = field(default_factory=dict)  # those that are no tensors
    slopes: str = ""  # "heads" or "batch heads"
    bias: str | None = None  # which axes are not broadcast; None for no bias
    bias_dtype: str = "own"  # or "float32"
    bias_layout: str = "contiguous"
    hidden: str = "none"  # what of the bias is -inf: "none", "some", "rows"
    sink: str = ""  # "normal", or with -inf for "some" heads or "all"
    grads: tuple[str, ...] = ()  # of out and lse
    deterministic: bool = False
    # Of packed calls, rows behind the last sequence, and how much max_seqlen is larger than needed.
    padding: int = 0
    slack: tuple[int, int] = (0, 0)
    cache: dict[str, Any] = field(default_factory=dict)  # of calls with a cache
    # NaN and infinities in the "bias" of what masks and lengths hide, and in the gradient of the
    # LSE of queries that see no key; with "rows" also in these queries and in keys nobody sees.
    poison: str = ""
    strided_ends: bool = False  # cu_seqlens and their like have gaps
    splits: int = 0  # CUTE_ATTENTION_SPLITS; 0 leaves it out
    way: str = ""  # one of WAYS; "" for the plain call

    def __str__(self) -> str:
        usual = Drawn(0, "", "", (), 0, 0, 0, 0, "")
        words = [
            f"{self.kind} {self.dtype} heads {self.heads}/{self.heads_kv} {self.dim}/{self.dim_v}"
        ]
        words += [f"lengths {' '.join(f'{q}x{k}' for q, k in self.lengths)}", self.numbers]
        for name in list(Drawn.__dataclass_fields__)[9:]:
            value = getattr(self, name)
            if value != getattr(usual, name):
                words.append(f"{name}={value}".replace(" ", ""))
        return ", ".join(words)

    @property
    def features(self) -> str:
        """The words by which failures are grouped."""
        words = [self.kind, self.numbers, *self.options]
        words += ["bias"] * (self.bias is not None) + ["alibi"] * bool(self.slopes)
        words += ["sink"] * bool(self.sink) + ["deterministic"] * self.deterministic
        words += ["poison"] * bool(self.poison) + [self.way] * bool(self.way)
        return "+".join(words)


def draw(seed: int, limits: Limits = Limits()) -> Drawn:
    """The call of a seed."""
    rng = random.Random(seed)

    def weighted(table: dict[str, int]) -> str:
        return rng.choices(list(table), list(table.values()))[0]

    kind = weighted({name: KINDS[name] for name in limits.kinds})
    call = Drawn(
        seed=seed,
        kind=kind,
        dtype=rng.choice(limits.dtypes),
        lengths=_lengths(rng, kind),
        **_heads(rng),
        **_dims(rng, limits, kind),
        numbers=weighted(NUMBERS),
        layouts=tuple(rng.choice(LAYOUTS) for _ in range(4)),
        options=_options(rng, kind),
        slopes=rng.choice(("heads", "batch heads")) if rng.random() < 0.2 else "",
        sink=rng.choice(("normal", "normal", "some", "all")) if rng.random() < 0.15 else "",
        strided_ends=rng.random() < 0.2,
        way=_way(rng, limits),
    )
    if kind in ("dense", "packed"):
        call = replace(
            call,
            grads=rng.choice((("out",), ("out",), ("out",), ("out", "lse"), ("lse",), ())),
            deterministic=rng.random() < 0.3,
            poison=rng.choice(limits.poison) if rng.random() < 0.3 else "",
            splits=rng.choice((1, 2, 3, 7, 128)) if rng.random() < 0.1 else 0,
        )
        if rng.random() < 0.3:
            call = replace(
                call,
                bias=rng.choice(BIASES),
                bias_dtype=rng.choice(("own", "own", "float32")),
                bias_layout=rng.choice(("contiguous", "sliced", "odd_slice", "keys_first")),
                hidden=rng.choice(("none", "none", "some", "rows")),
            )
    if kind == "packed":
        padding = rng.choice((0, 0, 1, 9, 130))
        slack = (rng.choice((0, 0, 1, 100, 3000)), rng.choice((0, 0, 1, 100, 3000)))
        call = replace(call, padding=padding, slack=slack if call.bias is None else (0, 0))
    if kind == "cache":
        call = replace(call, cache=_cache(rng, call.dim), layouts=("contiguous",) * 4)
    if not _has_way(call):
        call = replace(call, way="")
    return _within(rng, call, limits.scores)


def _lengths(rng: random.Random, kind: str) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of each sequence: as many of all in dense calls."""
    batch = rng.choice((1, 1, 2, 3, 4, 7)) if rng.random() < 0.97 else 0

    def pair() -> tuple[int, int]:
        queries = rng.choice(LENGTHS) if rng.random() < 0.7 else rng.randrange(1, 1200)
        keys = rng.choice(LENGTHS) if rng.random() < 0.7 else rng.randrange(1, 1500)
        form = rng.random()
        if form < 0.25:
            return queries, queries
        return (rng.randrange(1, 12), keys) if form < 0.45 else (queries, keys)

    if kind == "packed":
        return tuple(pair() for _ in range(batch))
    if kind == "cache":
        few = rng.choice((1, 1, 2, 5, 17, 130))
        return tuple((few, rng.choice(LENGTHS)) for _ in range(max(batch, 1)))
    return (pair(),) * batch


def _heads(rng: random.Random) -> dict[str, int]:
    if rng.random() < 0.01:
        return {"heads": 0, "heads_kv": rng.choice((0, 2))}
    heads_kv = rng.choice((1, 1, 2, 2, 3, 5))
    return {"heads": heads_kv * rng.choice(GROUPS), "heads_kv": heads_kv}


def _dims(rng: random.Random, limits: Limits, kind: str) -> dict[str, int]:
    usual = [dim for dim in (64, 96, 128, 192, 256) if dim in limits.dims]

    def one() -> int:
        choice = rng.random()
        if choice < 0.5:
            return rng.choice(usual)
        dim = rng.choice(limits.dims)
        return max(1, dim - rng.randrange(1, 8)) if choice > 0.95 and kind != "cache" else dim

    dim = one()
    return {"dim": dim, "dim_v": dim if rng.random() < 0.7 else one()}


def _options(rng: random.Random, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["causal"] = True
    if rng.random() < 0.3:
        options["window"] = tuple(
            rng.choice((None, 0, 0, 1, 5, 63, 64, 127, 128, 200, 2**31, 2**40)) for _ in range(2)
        )
    if rng.random() < 0.2:
        options["softcap"] = rng.choice((0.5, 2.0, 30.0, 1e4))
    if rng.random() < 0.15:
        options["scale"] = rng.choice((1.0, 0.3, 1e-3, 3.0, 1e-12, 40.0, 0.0, -0.1))
    if rng.random() < 0.15 and kind in ("dense", "packed"):
        options["dropout_p"] = rng.choice((0.1, 0.3, 0.5, 0.9, 1.0, 0.001, 1, 0, 0.0))
        options["dropout_seed"] = rng.choice((0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1))
    return options


def _way(rng: random.Random, limits: Limits) -> str:
    place = rng.random() * 100
    for way, many in WAYS.items():
        place -= many
        if place < 0:
            return way if way in limits.ways else ""
    return ""


def _has_way(call: Drawn) -> bool:
    """Whether a library's names can say what the call is."""
    if call.kind == "merge":
        return not call.way
    if not call.way.startswith("flash"):
        return True
    own = call.bias is None and not call.sink and "dropout_p" not in call.options
    if call.kind == "cache":
        own = own and not call.cache["batch_invariant"]
    if call.way == "flash_attn_interface":
        return own and not call.slopes
    new = ("packed", "qv", "chunk")  # to FlashAttention-3
    if call.kind == "cache":
        rotary = call.cache["rotary"] or {}
        own = own and not (any(call.cache[name] for name in new) or rotary.get("seqlens"))
    return own


def _cache(rng: random.Random, dim: int) -> dict[str, Any]:
    """Fields of `paged_calls.Form`, its number of splits, how the caches lie, what is appended, and
    the angles by which that is turned."""
    rotary = {
        "dim": rng.choice((0, 2, 6, dim // 4 * 2, dim // 2 * 2)),
        "interleaved": rng.random() < 0.5,
        "float": rng.random() < 0.4,
        "seqlens": rng.random() < 0.3,
    }
    page = rng.choice((0, 16, 32, 48, 64, 80, 256))
    return {
        "page_size": page,
        "packed": rng.random() < 0.3,
        "batch_idx": rng.random() < 0.3,
        "pads": page == 0 and rng.random() < 0.3,
        "new": rng.choice((0, 0, 1, 3, 20)),
        "splits": rng.choice((0, 0, 0, 1, 2, 3, 7, 128)),
        "batch_invariant": rng.random() < 0.2,
        "room": rng.choice((0, 0, 40, 900)),
        "max_seqlen_k": rng.random() < 0.3,
        "layout": rng.choice(
            ("contiguous", "contiguous", "contiguous", "sliced", "odd_slice", "heads_first")
        ),
        "rotary": rotary if rng.random() < 0.5 and rotary["dim"] <= dim else None,
        "qv": rng.random() < 0.1,
        "chunk": rng.choice((1, 16, 100, 3000)) if rng.random() < 0.1 else 0,
    }


def _within(rng: random.Random, call: Drawn, most: int) -> Drawn:
    """The call with so few sequences, heads and tokens that it has at most so many scores."""
    while call.heads * sum(q * k for q, k in call.lengths) > most:
        if len(call.lengths) > 1 and rng.random() < 0.3:
            call = replace(call, lengths=call.lengths[1:])
        elif call.heads > 4 * call.heads_kv:
            call = replace(call, heads=call.heads_kv * rng.choice((1, 2, 3, 4)))
        else:
            short = {
                (q, k): ((q + 1) // 2, k) if q > k else (q, (k + 1) // 2) for q, k in call.lengths
            }
            call = replace(call, lengths=tuple(short[pair] for pair in call.lengths))
    return call


if __name__ == "__main__":
    from random_runs import main

    main()
