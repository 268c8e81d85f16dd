"""New keys are appended while the forward already reads the cache: the bits are those of a forward
that waits.

So each call (AppendedKeys in params.h) is compared with steps that wait for each other: PyTorch's
operations turn q and k and write the cache, and a call without new keys reads it. Caches of pages
are in test_cache_beside_pages.py. On a GPU new keys come in time even where nothing
waits for them: that a wait is missing shows in the emulator, with the timing `late`
(docs/emulator.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention.inference import append, attention_with_cache
from cute_attention.inference.checked import NAME, checked_cache
from cute_attention.inference.options import with_defaults
from tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

BF16, HEADS, HEADS_KV, STEPS = torch.bfloat16, 8, 2, 200


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


class Step:
    """The tensors of a call. What the cache has behind its tokens is NaN."""

    def __init__(
        self, dim: int, lengths: list[int], new: int, queries: int, room: int, rotary: bool = True
    ) -> None:
        torch.manual_seed(len(lengths) + new)
        batch = len(lengths)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.caches = [numbers(batch, room, HEADS_KV, dim) for _ in range(2)]
        for cache in self.caches:
            for row, length in zip(cache, lengths, strict=True):
                row[length:] = torch.nan
        self.q = numbers(batch, queries, HEADS, dim)
        self.k, self.v = numbers(batch, new, HEADS_KV, dim), numbers(batch, new, HEADS_KV, dim)
        self.options: dict[str, Any] = {"causal": True, "backend": "sm90", "max_seqlen_k": room}
        if rotary:
            angles = torch.rand(room + new, dim // 2, device="cuda")
            self.options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}

    def run(self, caches: list[Tensor], **options: Any) -> Tensor:
        return attention_with_cache(
            self.q, *caches, self.lengths, k=self.k, v=self.v, **self.options, **options
        )

    def run_apart(self, caches: list[Tensor], **options: Any) -> Tensor:
        """The same by steps of which each has ended before the next begins."""
        given = {**self.options, **options}
        new = with_defaults(NAME, {**given, "k": self.k, "v": self.v})
        call = checked_cache(self.q, *caches, self.lengths, new)
        append.append(call)
        q = call.q if call.rotary_cos is None else append.rotated_queries(call)
        lengths = append.total_lengths(call)
        for name in ("rotary_cos", "rotary_sin", "cu_seqlens_k_new"):
            given.pop(name, None)
        return attention_with_cache(q, *caches, lengths, **given)

    def both(self, **options: Any) -> None:
        """Bits of the output and of the caches, beside the call that waits."""
        early, waits = ([cache.clone() for cache in self.caches] for _ in range(2))
        out = self.run(early, **options)
        wanted = self.run_apart(waits, **options)
        assert bool(wanted.isfinite().all())
        assert_same_bits(out, wanted, "out")
        for cache, want in zip(early, waits, strict=True):
            assert_same_bits(cache, want, "cache")


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("dim", [64, 128])
def test_edges_of_tiles(dim: int, rotary: bool) -> None:
    """The new key is the first, the only or the last of a tile, or stands in the middle of one."""
    lengths = [0, 1, 126, 127, 128, 129, 255, 256, 400, 511]
    for splits in (0, 1, 3):
        Step(dim, lengths, 1, 1, 640, rotary).both(num_splits=splits)
    Step(dim, lengths, 3, 3, 640, rotary).both(window=(100, 0), num_splits=2)


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("dim", [64, 128])
def test_all_tiles_are_new(dim: int, rotary: bool) -> None:
    """The kernel that appends takes longer than the forward, which has nothing else to read."""
    Step(dim, [0, 0, 1, 130], 520, 1, 700, rotary).both()
    Step(dim, [0, 0, 1, 130], 520, 1, 700, rotary).both(num_splits=5)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_slow_append(dim: int) -> None:
    Step(dim, [0] * 64, 2048, 1, 2048).both()
    Step(dim, [2048] * 64, 1500, 1, 4096).both(num_splits=4)


@pytest.mark.parametrize("dim", [64, 128])
def test_chunks_of_a_prompt(dim: int) -> None:
    """Most tiles of keys are older than the chunk, and CTAs have tiles of several sequences."""
    Step(dim, [900, 0, 513, 1000, 128], 300, 300, 1400).both()
    Step(dim, [900, 0, 513, 1000, 128], 300, 300, 1400, rotary=False).both(num_splits=2)


def test_padding_and_no_room() -> None:
    """Tokens count from the padding, and what has no place is not written."""
    step = Step(128, [300, 131, 640, 637], 5, 1, 640)
    step.both()
    leftpad = torch.tensor([5, 131, 200, 129], dtype=torch.int32, device="cuda")
    step.both(leftpad=leftpad)


def check_packed_tokens(step: Step) -> None:
    """A call of five sequences of head dim 128, with new tokens and without them, packed."""
    many = torch.tensor([7, 0, 300, 1, 129])
    ends = torch.cat((many.new_zeros(1), many.cumsum(0))).int().to("cuda")
    total = int(many.sum())
    step.q = numbers(total, HEADS, 128)
    step.k, step.v = numbers(total, HEADS_KV, 128), numbers(total, HEADS_KV, 128)
    step.both(cu_seqlens_q=ends, max_seqlen_q=300)
    only_queries = torch.arange(6, dtype=torch.int32, device="cuda")
    step.q = numbers(5, HEADS, 128)
    step.both(cu_seqlens_q=only_queries, max_seqlen_q=1, cu_seqlens_k_new=ends)


def test_packed_tokens() -> None:
    """CTAs take tiles of sequences with new tokens and without them in turn."""
    check_packed_tokens(Step(128, [250, 256, 0, 384, 130], 1, 1, 1024))


def test_no_new_token() -> None:
    """Without a token there may be no kernel before the forward: it waits for any other one."""
    step = Step(128, [250, 256, 3], 0, 1, 640, rotary=False)
    step.both()


def test_caches_that_overlap() -> None:
    """Keys whose memory is another token's values: all is written before anything is read. Where
    the last key is the first of its tile, the values are those of the tile before, which another
    split reads."""
    batch, room, dim = 3, 256, 64
    memory = numbers(batch, room + 1, HEADS_KV, dim)
    step = Step(dim, [128, 130, 255], 1, 1, room, rotary=False)
    step.v = step.k  # both write one number where they overlap
    for shift in (0, 1):
        step.lengths.clamp_(max=254)
        outs = []
        for run in (step.run, step.run_apart):
            copy = memory.clone()
            caches = [copy[:, :room], copy[:, shift : room + shift]]
            outs.append(run(caches, num_splits=3))
        assert_same_bits(outs[0], outs[1], f"out, values {shift} tokens further")


def test_caches_whose_rows_overlap() -> None:
    """Tokens come first, and the keys of a row are the values of the row before: a token that one
    sequence appends is an early one of the other, which another split reads."""
    memory = numbers(640, 3, HEADS_KV, 64)
    step = Step(64, [500, 10], 1, 1, 640, rotary=False)
    outs = []
    for run in (step.run, step.run_apart):
        rows = memory.clone().transpose(0, 1)
        outs.append(run([rows[:2], rows[1:]], num_splits=3))
    assert_same_bits(outs[0], outs[1], "out")


def decode(step: Step, run: Any, caches: list[Tensor], sums: Tensor, **options: Any) -> None:
    """A step whose tokens depend on every bit of the last one's, and are never above 2."""
    out = run(caches, **options)
    sums.add_(out.float())
    step.q.copy_(2 * torch.sin(out * 3 + step.q.flip(-1)))
    step.k.copy_(2 * torch.sin(out[:, :, :HEADS_KV] - step.k.flip(-1)))
    step.v.copy_(2 * torch.sin(out[:, :, HEADS_KV : 2 * HEADS_KV] + step.v.flip(-1)))
    step.lengths.add_(1)


def decoded(step: Step, graph: bool, steps: int, apart: bool, **options: Any) -> list[Tensor]:
    caches = [cache.clone() for cache in step.caches]
    sums = torch.zeros(step.q.shape, device="cuda")
    run = step.run_apart if apart else step.run
    if not graph:
        for _ in range(steps):
            decode(step, run, caches, sums, **options)
        return [sums, step.q, *caches]
    given = (step.q, step.k, step.v, step.lengths, sums, *caches)
    before = [tensor.clone() for tensor in given]
    decode(step, run, caches, sums, **options)
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for _ in range(4):
            decode(step, run, caches, sums, **options)
    for tensor, value in zip(given, before, strict=True):
        tensor.copy_(value)
    for _ in range(steps // 4):
        recorded.replay()
    return [sums, step.q, *caches]


def compare_steps(make: Callable[[], Step], graph: bool, steps: int, splits: int) -> None:
    found = decoded(make(), graph, steps, False, num_splits=splits)
    wanted = decoded(make(), False, steps, True, num_splits=splits)
    assert bool(wanted[0].isfinite().all())
    for name, one, other in zip(("sums", "q", "k", "v"), found, wanted, strict=True):
        assert_same_bits(one, other, name)


def check_steps(dim: int, graph: bool, steps: int, splits: int) -> None:
    compare_steps(lambda: Step(dim, [0, 100, 127, 500], 1, 1, 1024), graph, steps, splits)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_few_steps(dim: int) -> None:
    check_steps(dim, False, 4, 3)


@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("dim", [64, 128])
def test_steps_of_a_stream(dim: int, splits: int) -> None:
    """Nothing is between a step's kernels and the next step's but small kernels of PyTorch."""
    check_steps(dim, False, STEPS, splits)


@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("dim", [64, 128])
def test_steps_in_a_graph(dim: int, splits: int) -> None:
    check_steps(dim, True, STEPS, splits)


@pytest.mark.parametrize("graph", [False, True])
def test_layers_of_a_stream(graph: bool) -> None:
    """Calls that follow each other at once: the next one appends while nothing reads the cache."""
    step = Step(128, [700, 100, 127, 500], 1, 1, 1024)
    tokens = step.k.clone(), step.v.clone()

    def layers(run: Any, graph: bool) -> list[Tensor]:
        caches = [cache.clone() for cache in step.caches]
        outs = [torch.empty(0)] * 8

        def run_all() -> None:
            for layer in range(8):  # each overwrites the tokens of the one before
                step.k = tokens[layer % 2]
                outs[layer] = run(caches)

        run_all()
        if graph:
            torch.cuda.synchronize()
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                run_all()
            for _ in range(20):
                recorded.replay()
        return [*outs, *caches]

    for one, other in zip(layers(step.run, graph), layers(step.run_apart, False), strict=True):
        assert_same_bits(one, other, "a layer")
