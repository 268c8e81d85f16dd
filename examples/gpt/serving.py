"""Greedy text for several prompts at once: with a paged cache, and with PyTorch's padded one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_attention.inference import PagedCache, attention_with_cache

from .model import GPT, Shape


@dataclass(frozen=True)
class Texts:
    """What was written after each prompt, prompts included, and how fast."""

    texts: list[bytes]
    tokens_per_second: float  # of what was written; reading the prompts is in the time


class PagedAttention:
    """Attention of a model's layers, which call it in turn, to sequences in a PagedCache.

    All tokens of a step lie in one row, one sequence after the other: sequences that read their
    prompts and sequences that write one token each are the same kind of call.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def begin(self, sequences: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Makes room for the tokens of a step. Returns their positions, `[1, total]`."""
        device = self._cache.k[0].device
        lengths = [self._cache.length(sequence) for sequence in sequences]
        self._step = self._cache.append(sequences, counts)
        self._ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32).to(device)
        self._longest = max(counts)
        self._layer = 0
        places = [range(n, n + m) for n, m in zip(lengths, counts, strict=True)]
        return torch.tensor([list(itertools.chain(*places))], device=device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends the keys and values of one layer, and attends to all: `[1, total, heads,
        head_dim]`."""
        layer, self._layer = self._layer, self._layer + 1
        out = attention_with_cache(
            q[0],
            self._cache.k[layer],
            self._cache.v[layer],
            self._step.cache_seqlens,
            k=k[0],
            v=v[0],
            block_table=self._step.block_table,
            cu_seqlens_q=self._ends,
            max_seqlen_q=self._longest,
            causal=True,
        )
        return out[None]


class PaddedAttention:
    """The same with PyTorch's own attention: a rectangle of keys as long as the longest sequence
    may become, and a mask of what each query sees."""

    def __init__(self, shape: Shape, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        size = shape.layers, 2, batch, shape.heads_kv, shape.context, shape.head_dim
        self._cache = torch.zeros(size, dtype=dtype, device=device)
        self._key = torch.arange(shape.context, device=device)
        self._grouped = shape.heads != shape.heads_kv

    def begin(self, lengths: Tensor, count: int) -> Tensor:
        """Starts a step of `count` tokens for each sequence. Returns their positions, `[batch,
        count]`."""
        self._places = lengths[:, None] + torch.arange(count, device=lengths.device)
        self._mask = (self._key <= self._places[..., None])[:, None]  # (batch, 1, count, context)
        self._layer = 0
        return self._places

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[batch, count, heads, head_dim]`."""
        cache, self._layer = self._cache[self._layer], self._layer + 1
        rows = torch.arange(len(q), device=q.device)[:, None]
        for kept, new in zip(cache, (k, v), strict=True):
            kept[rows, :, self._places] = new
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), *cache, attn_mask=self._mask, enable_gqa=self._grouped
        )
        return out.transpose(1, 2)


def _model_with(model: GPT, attend: PagedAttention | PaddedAttention) -> GPT:
    """A model with the same weights and another attention."""
    with torch.device(model.embedding.weight.device):
        other = GPT(model.shape, attend)
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def write_paged(
    model: GPT, prefix: bytes, prompts: Sequence[bytes], length: int, page_size: int = 16
) -> Texts:
    """Continues `prefix + prompt` for each prompt. The prefix is read once: all sequences are forks
    of one, and share its pages."""
    shape, weight = model.shape, model.embedding.weight
    room = len(prefix) + max(map(len, prompts)) + length
    cache = PagedCache(
        pages=(len(prompts) + 1) * -(-room // page_size),
        page_size=page_size,
        heads_kv=shape.heads_kv,
        head_dim=shape.head_dim,
        layers=shape.layers,
        dtype=_cache_dtype(model),
        device=weight.device,
    )
    attend = PagedAttention(cache)
    model = _model_with(model, attend)

    def step(sequences: list[int], fresh: list[list[int]]) -> list[int]:
        """The most likely byte after the fresh ones of each sequence."""
        counts = [len(tokens) for tokens in fresh]
        places = attend.begin(sequences, counts)
        tokens = torch.tensor([list(itertools.chain(*fresh))], device=weight.device)
        logits = model(tokens, position=places)[0]
        lasts = torch.tensor(list(itertools.accumulate(counts)), device=weight.device) - 1
        return logits[lasts].argmax(-1).tolist()

    start = time.perf_counter()
    root = cache.allocate()
    if prefix:
        step([root], [list(prefix)])
    sequences = [cache.fork(root) for _ in prompts]
    cache.free(root)
    texts = [list(prompt) for prompt in prompts]
    fresh = [list(prompt) for prompt in prompts]
    for _ in range(length):
        found = step(sequences, fresh)
        fresh = [[token] for token in found]
        for text, token in zip(texts, found, strict=True):
            text.append(token)
    seconds = time.perf_counter() - start
    written = [prefix + bytes(text) for text in texts]
    return Texts(written, len(prompts) * length / seconds)


@torch.no_grad()
def write_padded(model: GPT, prefix: bytes, prompts: Sequence[bytes], length: int) -> Texts:
    """The same with PyTorch's attention, where each sequence reads the prefix by itself."""
    device = model.embedding.weight.device
    attend = PaddedAttention(model.shape, len(prompts), _cache_dtype(model), device)
    model = _model_with(model, attend)
    start = time.perf_counter()
    texts = [list(prefix + prompt) for prompt in prompts]
    longest = max(map(len, texts))
    fresh = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    ends = torch.tensor([len(text) for text in texts], device=device)
    lengths = torch.zeros_like(ends)
    rows = torch.arange(len(texts), device=device)
    for _ in range(length):
        logits = model(fresh, position=attend.begin(lengths, fresh.shape[1]))
        found = logits[rows, ends - lengths - 1].argmax(-1)
        lengths, ends, fresh = ends, ends + 1, found[:, None]
        for text, token in zip(texts, found.tolist(), strict=True):
            text.append(token)
    seconds = time.perf_counter() - start
    return Texts([bytes(text) for text in texts], len(prompts) * length / seconds)


@torch.no_grad()
def largest_gap(model: GPT, texts: Sequence[bytes], length: int) -> float:
    """How far the logits of the last `length` bytes lie below the most likely ones that the model
    finds without a cache, at most: 0 where the texts are the greedy ones.

    A causal model computes in one pass over a text what it would compute byte by byte.
    """
    device = model.embedding.weight.device
    gap = 0.0
    for text in texts:
        tokens = torch.tensor([list(text)], device=device)
        logits = model(tokens[:, :-1])[0, -length:].float()
        chosen = logits.gather(1, tokens[0, -length:, None])[:, 0]
        gap = max(gap, float((logits.amax(1) - chosen).max()))
    return gap


def _cache_dtype(model: GPT) -> torch.dtype:
    """The dtype of keys and values: autocast's where it is on."""
    kind = model.embedding.weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
