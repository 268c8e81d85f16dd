"""batch_invariant with kernels: a row of the output has the bits that it would have alone, however
its prompt came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention.inference import attention_with_cache, explain_with_cache
from tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

BACKENDS = ["sm90", "sm80"]
PROMPT = 1500
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (300, 0)},
    "softcap": {"causal": True, "softcap": 20.0},
}


def tensors(dim: int, heads: tuple[int, int], magnitude: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(dim)
    shapes = [(PROMPT, heads[0], dim), (PROMPT, heads[1], dim), (PROMPT, heads[1], dim)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return tuple(t.bfloat16().cuda() for t in (q * magnitude, k, v))


def in_chunks(
    given: tuple[Tensor, ...], chunks: list[int], batch: int, backend: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a prompt that comes in these chunks, as the last of `batch` sequences, of
    which the others are longer or shorter."""
    q, k, v = given
    room = PROMPT + 500
    caches = [torch.randn(batch, room, *t.shape[1:], device="cuda").to(t.dtype) for t in (k, v)]
    lengths = torch.arange(batch, device="cuda").int() * 400 % room
    outs, lses, done = [], [], 0
    for count in chunks:
        part = slice(done, done + count)
        lengths[-1] = done
        news = [t[part].expand(batch, *t[part].shape) for t in (q, k, v)]
        out, lse = attention_with_cache(
            news[0], *caches, lengths, k=news[1], v=news[2], backend=backend,
            batch_invariant=True, return_lse=True, **options,
        )  # fmt: skip
        outs.append(out[-1])
        lses.append(lse[-1])
        done += count
    return torch.cat(outs), torch.cat(lses, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)], ids=str)
def test_chunks_and_the_batch_change_no_bit(
    backend: str, mask: str, dim: int, heads: tuple[int, int]
) -> None:
    """At once, in chunks that end anywhere, token by token; alone and among others; rows whose
    scores grow."""
    options = MASKS[mask]
    for magnitude in (1.0, 8.0):
        given = tensors(dim, heads, magnitude)
        explanation = explain_with_cache(
            given[0][None, :1], *(t[None] for t in given[1:]), 1, batch_invariant=True,
            backend=backend, **options,
        )  # fmt: skip
        if explanation.chosen is None:
            pytest.skip(f"no {backend} kernel of this GPU is built for the call")
        whole = in_chunks(given, [PROMPT], 1, backend, **options)
        token_by_token = [1390, *[1] * 110]
        for chunks, batch in (
            ([PROMPT], 7), ([700, 1, 63, 64, 65, 607], 1), ([128] * 11 + [92], 40),
            (token_by_token, 1), (token_by_token, 3),
        ):  # fmt: skip
            found = in_chunks(given, chunks, batch, backend, **options)
            for one, other, name in zip(found, whole, ("out", "lse"), strict=True):
                assert_same_bits(one, other, f"{name}, {len(chunks)} chunks, batch {batch}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_splits_change_bits_where_nothing_is_promised(backend: str) -> None:
    """The test above can fail: another number of splits gives other bits."""
    q, k, v = tensors(128, (8, 2))
    given = q[None, -1:], k[None], v[None], PROMPT
    if explain_with_cache(*given, backend=backend).chosen is None:
        pytest.skip(f"no {backend} kernel of this GPU is built for the call")
    results = [
        attention_with_cache(*given, num_splits=splits, backend=backend) for splits in (1, 6)
    ]
    assert not torch.equal(*results)
    promised = [
        attention_with_cache(*given, num_splits=splits, batch_invariant=True, backend=backend)
        for splits in (0, 1, 6)
    ]
    for found in promised:
        assert_same_bits(found, results[0], "out")
