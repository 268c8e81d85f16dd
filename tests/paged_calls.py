"""Calls with a cache that kernels read where it lies, what they should return, and functions that
compare the two. Everything that may not be read is poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention_reference
from cute_attention.inference import attention_with_cache, explain_with_cache
from kernel_calls import offsets
from tolerances import assert_as_accurate, assert_close

# Entries of a table for pages that a sequence does not need. The None is a page that is there, full
# of NaN.
GARBAGE = (2**31 - 1, -1, None, 2**30, -(2**31), None, 123456)


@dataclass(frozen=True)
class Form:
    """What a call looks like."""

    page_size: int = 0  # 0: contiguous
    lengths: tuple[int, ...] = (0, 1, 64, 333)
    queries: tuple[int, ...] = (1, 1, 1, 1)  # of each sequence
    packed: bool = False  # else all have as many queries as the first
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    room: int = 0  # 0: what the longest sequence needs and a few tokens more
    batch_idx: bool = False
    leftpad: tuple[int, ...] = ()
    appended: tuple[int, ...] = ()  # tokens of each sequence that a call brings: it has their pages
    shared: int = 0  # so many tokens in front are those of the first sequence, in the same pages
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16


class Call:
    """The tensors of a call. Forms that differ in pages alone have the same tokens."""

    def __init__(self, form: Form, device: str = "cuda") -> None:
        self.form = form
        generator = torch.Generator().manual_seed(sum(form.lengths) + form.dims[0])

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(form.dtype)

        batch, (heads, heads_kv) = len(form.lengths), form.heads
        self.many = list(form.queries) if form.packed else [form.queries[0]] * batch
        q = rand(sum(self.many), heads, form.dims[0])
        self.queries = [part[None].to(device) for part in q.split(self.many)]
        tokens = [[rand(n, heads_kv, dim) for n in form.lengths] for dim in form.dims]
        for cache in tokens:
            for b, length in enumerate(form.lengths):
                common = min(form.shared, length, form.lengths[0])
                cache[b][:common] = cache[0][:common]
        starts = form.leftpad or (0,) * batch
        self.keys = [
            [t[min(s, len(t)) :][None].to(device) for t, s in zip(cache, starts, strict=True)]
            for cache in tokens
        ]
        lengths = torch.tensor(form.lengths, dtype=torch.int32)
        self.given: dict[str, Any] = {"cache_seqlens": lengths, **form.options}
        self.given["q"] = q if form.packed else q.unflatten(0, (batch, -1))
        if form.packed:
            ends = offsets(self.many, "cpu")
            self.given |= {"cu_seqlens_q": ends, "max_seqlen_q": max(self.many)}
        if form.leftpad:
            self.given["leftpad"] = torch.tensor(form.leftpad, dtype=torch.int32)
        self.rows = list(range(batch))
        if form.batch_idx:
            self.rows = torch.randperm(batch + 2, generator=generator)[:batch].tolist()
            self.given["cache_batch_idx"] = torch.tensor(self.rows, dtype=torch.int32)
        room = form.room or max(form.lengths) + 5
        (self._place_pages if form.page_size else self._place)(tokens, room, starts)
        for name, value in self.given.items():
            if isinstance(value, Tensor):
                self.given[name] = value.to(device)

    def _place(self, tokens: list[list[Tensor]], room: int, starts: tuple[int, ...]) -> None:
        """A contiguous cache; what is beyond the tokens and in the padding is NaN."""
        for name, cache in zip(("k_cache", "v_cache"), tokens, strict=True):
            shape = len(cache) + 2 * self.form.batch_idx, room, *cache[0].shape[1:]
            whole = torch.full(shape, torch.nan, dtype=self.form.dtype)
            for row, rows, start in zip(self.rows, cache, starts, strict=True):
                whole[row, start : len(rows)] = rows[start:]
            self.given[name] = whole

    def _place_pages(self, tokens: list[list[Tensor]], room: int, starts: tuple[int, ...]) -> None:
        """Pages in any order, between others full of NaN."""
        form, size = self.form, self.form.page_size
        width = -(-room // size)
        count = sum(-(-n // size) for n in form.lengths) + 3
        order = torch.randperm(count, generator=torch.Generator().manual_seed(size)).tolist()
        poisoned = order.pop()
        table = torch.empty(len(self.rows) + 2 * form.batch_idx, width, dtype=torch.int32)
        garbage = cycle(poisoned if entry is None else entry for entry in GARBAGE)
        table.flatten().copy_(torch.tensor([next(garbage) for _ in range(table.numel())]))
        for b, length in enumerate(form.lengths):
            common = min(form.shared, length, form.lengths[0]) // size if b else 0
            first = self._first_needed(b) // size
            for index in range(first, -(-length // size)):
                shared = self._first_needed(0) // size <= index < common
                page = int(table[self.rows[0], index]) if shared else order.pop()
                table[self.rows[b], index] = page
        self.given["block_table"] = table
        for name, cache in zip(("k_cache", "v_cache"), tokens, strict=True):
            whole = torch.full((count, size, *cache[0].shape[1:]), torch.nan, dtype=form.dtype)
            for b, rows in enumerate(cache):
                for index in range(self._first_needed(b) // size, -(-len(rows) // size)):
                    part = rows[index * size : (index + 1) * size]
                    whole[table[self.rows[b], index], : len(part)] = part
            self.given[name] = whole

    def _first_needed(self, b: int) -> int:
        """The first token that the first query of a sequence sees, or that a call appends."""
        left = self.form.options.get("window", (None, None))[0]
        length = self.form.lengths[b]
        if left is None:
            return 0
        appended = self.form.appended[b] if self.form.appended else 0
        return max(min(length - self.many[b] - left, length - appended), 0)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output and LSE of all queries in float64, `[total, heads, dim_v]` and `[heads, total]`,
        and the output of plain PyTorch in the dtype of the call."""
        names = ("causal", "window", "softcap", "scale", "alibi_slopes", "sink")
        options = {name: self.given[name] for name in names if name in self.given}
        outs, lses, plain = [], [], []
        for q, k, v in zip(self.queries, *self.keys, strict=True):
            tensors = q.double(), k.double(), v.double()
            out, lse = attention_reference(*tensors, **options, return_lse=True)
            outs.append(out[0])
            lses.append(lse[0])
            plain.append(self._plain(q, k, v))
        return torch.cat(outs), torch.cat(lses, -1), torch.cat(plain)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[queries, heads, dim_v]`, every step in the dtype of the inputs."""
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * self.given.get("scale", q.shape[-1] ** -0.5)
        if cap := self.given.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        n, m = scores.shape[1:]
        difference = torch.arange(m, device=q.device) - torch.arange(n, device=q.device)[:, None]
        difference = difference - (m - n)
        if (slopes := self.given.get("alibi_slopes")) is not None:
            scores = scores - slopes[:, None, None].to(scores.dtype) * difference.abs()
        left, right = self.given.get("window", (None, None))
        right = 0 if self.given.get("causal") else right
        hidden = torch.zeros_like(difference, dtype=torch.bool)
        if left is not None:
            hidden |= difference < -left
        if right is not None:
            hidden |= difference > right
        scores = scores.masked_fill(hidden, -torch.inf)
        if (sink := self.given.get("sink")) is not None:
            column = sink[:, None, None].to(scores.dtype).expand(-1, n, 1)
            return (torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v).transpose(0, 1)
        return (scores.softmax(-1) @ v).nan_to_num().transpose(0, 1)

    def flat(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results of the call as `expected` returns them."""
        if self.form.packed:
            return out, lse
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def skip_unless_served(given: dict[str, Any], backend: str) -> None:
    explanation = explain_with_cache(**given, backend=backend)
    if explanation.chosen is None:
        pytest.skip(f"no {backend} kernel of this GPU is built for the call")
    assert "cache read in place" in str(explanation)


def served(form: Form, backend: str) -> Call:
    """The call of a form; skips a test where the backend has no kernel for it."""
    call = Call(form)
    skip_unless_served(call.given, backend)
    return call


def run(call: Call, backend: str, **changes: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE, flat."""
    given = {**call.given, **changes}
    out, lse = attention_with_cache(**given, backend=backend, return_lse=True)
    return call.flat(out, lse)


def check(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Output and LSE, flat, compared with float64."""
    out, lse = run(call, backend)
    exact, exact_lse, plain = call.expected()
    assert_close(lse.double(), exact_lse, "gradient", torch.float32, "lse")
    assert_as_accurate(out, exact, plain, f"{call.form}")
    return out, lse


def refill(given: dict[str, Any], other: dict[str, Any]) -> None:
    """Writes the numbers of another call into the tensors of this one, whose caches may have more
    rows or pages."""
    for name, value in other.items():
        if name in ("k_cache", "v_cache"):
            given[name].fill_(torch.nan)
            given[name][: value.shape[0]].copy_(value)
        elif isinstance(value, Tensor):
            given[name].copy_(value)
