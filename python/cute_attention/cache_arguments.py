"""The table of arguments of a call with a KV cache: what it consists of once it is checked.

`CacheArguments` is for `attention_with_cache` what `Arguments` is for `attention`: the schema of
the ops is derived from it, and every backend takes the record itself. `inference/api.py` says what
each argument means to users.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from torch import Tensor

from .arguments import Arguments
from .options import Window

WRITTEN = "written"  # marks a tensor into which the op writes
# Bits of Problem.features, which are those of Feature in config.h.
CACHE = 64  # asks for a kernel that reads keys in a cache
QV = 128  # asks for one that reads qv


class CacheArguments(NamedTuple):
    """The checked arguments of a call, in the order of the ops' schemas.

    An int of 0 stands for "not said" where 0 says nothing: `max_seqlen_k`, `attention_chunk`,
    `num_splits`. A window bound of -1 is unbounded.
    """

    q: Tensor  # [batch, seqlen_q, heads, head_dim], packed [total_q, heads, head_dim]
    k_cache: Annotated[Tensor, WRITTEN]  # [rows, room, heads_kv, head_dim], or pages of that form
    v_cache: Annotated[Tensor, WRITTEN]  # [rows, room, heads_kv, head_dim_v], likewise
    cache_seqlens: Tensor  # int32 [batch]: tokens in the cache before this call
    backend: str
    scale: float
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    k: Tensor | None = None  # [batch, seqlen_new, heads_kv, head_dim], packed [total_new, ...]
    v: Tensor | None = None
    block_table: Tensor | None = None  # int32 [rows, pages of a sequence]
    cu_seqlens_q: Tensor | None = None  # int32 [batch + 1], of packed queries
    max_seqlen_q: int = 0  # of packed queries alone
    max_seqlen_k: int = 0  # at least the longest sequence with its new tokens
    cu_seqlens_k_new: Tensor | None = None  # int32 [batch + 1], of packed new keys
    cache_batch_idx: Tensor | None = None  # int32 [batch]: the row of the cache, or of the table
    leftpad: Tensor | None = None  # int32 [batch]: the first token of each sequence
    rotary_cos: Tensor | None = None  # [positions, rotary_dim / 2]
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True
    rotary_seqlens: Tensor | None = None  # int32 [batch], for angles in the place of cache_seqlens
    alibi_slopes: Tensor | None = None  # [heads] or [batch, heads]
    sink: Tensor | None = None  # [heads]
    qv: Tensor | None = None  # like q with v's head dim
    attention_chunk: int = 0
    num_splits: int = 0
    batch_invariant: bool = False

    @property
    def packed(self) -> bool:
        """Whether queries lie one sequence after the other."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def room(self) -> int:
        """How many tokens of one sequence there is room for."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * self.k_cache.shape[1]

    @property
    def is_masked(self) -> bool:
        """Whether a mask tells one query from the next."""
        return self.window_left >= 0 or self.window_right >= 0 or self.attention_chunk > 0

    @property
    def window(self) -> Window:
        """`(left, right)` as `attention` takes it."""
        left, right = self.window_left, self.window_right
        return (left if left >= 0 else None), (right if right >= 0 else None)

    def as_attention(self) -> Arguments:
        """The call of `attention` that reads these queries and keys: which backends serve it, and
        what is checked of the options that both functions have."""
        return Arguments(
            self.q, self.k_cache, self.v_cache, self.backend, self.scale, self.window_left,
            self.window_right, self.softcap, self.cu_seqlens_q, None, self.max_seqlen_q, self.room,
            alibi_slopes=self.alibi_slopes, sink=self.sink,
        )  # fmt: skip


_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    str: "str",
    bool: "bool",
}


def _schema() -> str:
    parts, letters = [], iter("abc")
    for name, hint in get_type_hints(CacheArguments, include_extras=True).items():
        kind, *notes = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        words = f"Tensor({next(letters)}!)" if WRITTEN in notes else _TYPES[kind]
        default = f"={DEFAULTS[name]}" if name in DEFAULTS else ""
        parts.append(f"{words} {name}{default}")
    return ", ".join(parts)


NAMES = CacheArguments._fields
DEFAULTS: dict[str, Any] = CacheArguments._field_defaults
SCHEMA = _schema()
