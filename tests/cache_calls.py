"""Calls with a KV cache, and what they should leave behind, sequence by sequence in plain PyTorch.

Everything that a call may not read is poisoned: what the cache holds beyond a sequence's tokens and
in its padding is NaN, and so are pages that no sequence has. Entries of a table for pages that a
sequence does not need name none.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cute_attention import attention_reference
from flash_attn_plain import rotated

LENGTHS = (0, 1, 15, 16, 31, 48, 64, 65)  # in the cache, around the edges of pages
LEFTPAD = (0, 0, 3, 16, 0, 17, 1, 70)
QUERIES = (1, 4, 0, 2, 1, 9, 3, 1)  # of packed sequences
NEW = (1, 3, 0, 1, 17, 2, 0, 1)
HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 16, 24
ROOM = 96


@dataclass(frozen=True)
class Form:
    """What a call looks like, but for its numbers."""

    page_size: int = 0  # 0: contiguous
    new: int | None = None  # tokens of each sequence; None: none
    queries: int = 3
    packed: bool = False  # with QUERIES and NEW
    rotary: str = ""  # "interleaved" or "halves", and "partial"
    leftpad: bool = False
    batch_idx: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = LENGTHS

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in vars(self).items() if value not in ("", None)]
        return " ".join(words)


class Call:
    """The tensors of a form. A form always gets the same numbers."""

    def __init__(self, form: Form, device: str = "cpu") -> None:
        torch.manual_seed(zlib.crc32(str(form).encode()))
        self.form, batch = form, len(form.lengths)
        self.many_q = list(QUERIES[:batch]) if form.packed else [form.queries] * batch
        self.many_new = [form.new or 0] * batch
        if form.packed and form.new:
            self.many_new = list(NEW[:batch])
        self.starts = list(LEFTPAD[:batch]) if form.leftpad else [0] * batch
        self.rows = torch.randperm(batch + 2)[:batch].tolist() if form.batch_idx else range(batch)
        # Logical caches, one row for each sequence of the call, poisoned.
        self.tokens = [self._rand(batch, ROOM, HEADS_KV, dim) for dim in (DIM, DIM_V)]
        for cache in self.tokens:
            for b, length in enumerate(form.lengths):
                cache[b, : min(self.starts[b], length)] = torch.nan
                cache[b, length:] = torch.nan
        q_shape = [sum(self.many_q)] if form.packed else [batch, form.queries]
        self.given: dict[str, Any] = {
            "q": self._rand(*q_shape, HEADS, DIM),
            "cache_seqlens": self._int(form.lengths),
            **form.options,
        }
        if form.new is not None:
            shape = [sum(self.many_new)] if form.packed else [batch, form.new]
            self.given["k"] = self._rand(*shape, HEADS_KV, DIM)
            self.given["v"] = self._rand(*shape, HEADS_KV, DIM_V)
        if form.packed:
            self.given["cu_seqlens_q"] = self._ends(self.many_q)
            self.given["max_seqlen_q"] = max(self.many_q)
            if form.new is not None:
                self.given["cu_seqlens_k_new"] = self._ends(self.many_new)
        if form.leftpad:
            self.given["leftpad"] = self._int(self.starts)
        if form.batch_idx:
            self.given["cache_batch_idx"] = self._int(self.rows)
        if form.rotary:
            half = 4 if "partial" in form.rotary else DIM // 2
            angles = torch.rand(ROOM + 17, half) * 6
            self.given["rotary_cos"] = angles.cos().to(form.dtype)
            self.given["rotary_sin"] = angles.sin().to(form.dtype)
            self.given["rotary_interleaved"] = "interleaved" in form.rotary
        self._place()
        for name, value in self.given.items():
            if isinstance(value, Tensor):
                self.given[name] = value.to(device)

    def _rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(self.form.dtype)

    @staticmethod
    def _int(values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    def _ends(self, lengths: list[int]) -> Tensor:
        return self._int([0, *torch.tensor(lengths).cumsum(0).tolist()])

    def _place(self) -> None:
        """The caches, contiguous or of pages, from the logical ones."""
        batch, page = len(self.form.lengths), self.form.page_size
        count = batch + 2 if self.form.batch_idx else batch
        if not page:
            for name, tokens in zip(("k_cache", "v_cache"), self.tokens, strict=True):
                cache = torch.full((count, *tokens.shape[1:]), torch.nan, dtype=tokens.dtype)
                cache[torch.tensor(list(self.rows))] = tokens
                self.given[name] = cache
            return
        width = ROOM // page
        pages = torch.randperm(batch * width + 5)
        table = torch.full((count, width), 2**30, dtype=torch.int32)
        for name, tokens in zip(("k_cache", "v_cache"), self.tokens, strict=True):
            shape = len(pages), page, *tokens.shape[2:]
            self.given[name] = torch.full(shape, torch.nan, dtype=tokens.dtype)
        for b, row in enumerate(self.rows):
            used = -(-(self.form.lengths[b] + self.many_new[b]) // page)
            first = min(self.starts[b], self.form.lengths[b]) // page
            for index in range(first, used):
                number = int(pages[b * width + index])
                table[row, index] = number
                for name, tokens in zip(("k_cache", "v_cache"), self.tokens, strict=True):
                    self.given[name][number] = tokens[b, index * page : (index + 1) * page]
        self.given["block_table"] = table

    def slot(self, sequence: int, position: int) -> tuple[int, int]:
        """Where a token lies: the first two indices of the caches."""
        row = self.rows[sequence]
        if not self.form.page_size:
            return row, position
        page, place = divmod(position, self.form.page_size)
        return int(self.given["block_table"][row, page]), place

    def _of(self, name: str, many: list[int], sequence: int) -> Tensor:
        tensor = self.given[name].cpu()
        if not self.form.packed:
            return tensor[sequence]
        ends = torch.tensor([0, *many]).cumsum(0).tolist()
        return tensor[ends[sequence] : ends[sequence + 1]]

    @property
    def is_masked(self) -> bool:
        return any(self.given.get(name) for name in ("causal", "window", "attention_chunk"))

    def turned(self, rows: Tensor, first: int, tells_apart: bool = True) -> Tensor:
        """Rows `[length, heads, dim]` by the angles of `first` on."""
        if "rotary_cos" not in self.given:
            return rows
        places = torch.arange(len(rows)) if tells_apart else torch.zeros(len(rows)).long()
        cos, sin = self.given["rotary_cos"].cpu(), self.given["rotary_sin"].cpu()
        interleaved = self.given["rotary_interleaved"]
        return rotated(rows[None], cos, sin, places[None] + first, interleaved)[0]

    def caches_after(self) -> list[Tensor]:
        """The caches with the new tokens in them, from those before the call."""
        after = [self.given[name].cpu().clone() for name in ("k_cache", "v_cache")]
        for b, (length, many) in enumerate(zip(self.form.lengths, self.many_new, strict=True)):
            if not many:
                continue
            k, v = (self._of(name, self.many_new, b) for name in ("k", "v"))
            for i in range(many):
                after[0][self.slot(b, length + i)] = self.turned(k, length)[i]
                after[1][self.slot(b, length + i)] = v[i]
        return after

    def sequences(self, caches: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each sequence q `[1, rows, heads, dim]`, turned, and its k and v in `caches`."""
        found = []
        for b, (length, many) in enumerate(zip(self.form.lengths, self.many_new, strict=True)):
            total = length + many
            slots = [self.slot(b, t) for t in range(min(self.starts[b], total), total)]
            keys = [
                torch.stack([c[s] for s in slots])[None] if slots else c[:1, :0] for c in caches
            ]
            q = self.turned(self._of("q", self.many_q, b), length, self.is_masked)
            found.append((q[None], *keys))
        return found

    def expected(
        self, caches: list[Tensor], dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE by the formula, `[total_q, heads, dim_v]` and `[heads, total_q]`."""
        names = ("causal", "window", "scale", "softcap", "alibi_slopes", "sink")
        options = {name: self.given[name] for name in names if name in self.given}
        outs, lses = [], []
        for b, tensors in enumerate(self.sequences(caches)):
            mine = {
                name: value[b] if name == "alibi_slopes" and value.dim() == 2 else value
                for name, value in options.items()
            }
            chunk = self.given.get("attention_chunk", 0)
            q, k, v = (t.to(dtype) for t in tensors)
            if chunk:
                mine["bias"] = chunk_bias(q.shape[1], k.shape[1], chunk, dtype)
            mine = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in mine.items()}
            out, lse = attention_reference(q, k, v, **mine, return_lse=True)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, -1)

    def flat(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results as `expected` returns them."""
        out, lse = out.cpu(), lse.cpu()
        if self.form.packed:
            return out, lse
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def chunk_bias(seqlen_q: int, seqlen_k: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """0 where query and key are of one chunk, else -inf."""
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    same = i.div(chunk, rounding_mode="floor") == torch.arange(seqlen_k) // chunk
    return torch.zeros(same.shape, dtype=dtype).masked_fill(~same, -torch.inf)


def rows_of(ends: Tensor) -> list[slice]:
    """The rows of each packed sequence."""
    return [slice(*pair) for pair in pairwise(ends.tolist())]
