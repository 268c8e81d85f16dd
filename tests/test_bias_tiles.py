"""A bias whose rows lie at multiples of 16 bytes, which kernels load in tiles, on every row that
computes one, on a GPU. The results are those of the same numbers at other addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.native import rows
from cute_attention.semantics.formula import attention_varlen_reference
from every_row import ALL, DTYPES, backend_of, fixture_of, skip_unless_one_feature_chooses_it
from kernel_calls import (
    assert_all_as_accurate,
    in_float64,
    in_pytorch,
    inputs_of,
    offsets,
    shape_of_bias,
)
from other_tiles import assert_differ_by_roundings, variances
from test_bias import MASKS, assert_exact, laid_out, results
from tolerances import assert_close, assert_near, assert_same_bits

pytestmark = pytest.mark.gpu

row = fixture_of(
    [row for row in ALL if "bias" in row.score_mods], skip_unless_one_feature_chooses_it
)


@pytest.fixture(params=["16 bits", "fp32"])
def numbers(request: pytest.FixtureRequest, row: rows.TableRow) -> torch.dtype:
    """Of the bias: what q has, or fp32."""
    return torch.float32 if request.param == "fp32" else DTYPES[row.dtype]


KEPT = ["bhqk", "hqk", "bqk", "qk", "bhk", "hk", "bk", "k"]
# Batch, queries, keys, heads and KV heads. Of the second to the fourth, heads share a tile.
SHAPES = {
    "ragged": (2, 150, 203, 6, 6),
    "decode": (3, 1, 1000, 8, 1),
    "few queries": (2, 20, 300, 12, 2),
    "group of five": (1, 40, 130, 10, 2),
    "many tiles": (1, 520, 1100, 4, 2),
    "one key more": (1, 129, 129, 2, 2),
}


def bias_of(shape: tuple[int, ...], kept: str, dtype: torch.dtype) -> Tensor:
    """Random numbers, [batch, heads, seqlen_q, seqlen_k] with 1 for what is broadcast."""
    batch, queries, keys, heads, _ = shape
    made = torch.randn(shape_of_bias(kept, batch, heads, queries, keys), device="cuda")
    return made.to(dtype) * 2


def aligned(bias: Tensor) -> Tensor:
    """The same numbers, each row at a multiple of 16 bytes, and NaN between rows."""
    keys = bias.shape[-1]
    wide = bias.new_full((*bias.shape[:-1], keys + 8 + -keys % 8), torch.nan)
    wide[..., :keys] = bias
    return wide[..., :keys]


def crooked(bias: Tensor) -> Tensor:
    """The same numbers where TMA cannot load them: each row begins one number too late."""
    return laid_out(bias, "odd rows")


def assert_agree(
    found: dict[str, Tensor], expected: dict[str, Tensor], variance: dict[str, Tensor]
) -> None:
    """The kernels differ in their tiles, and the results by what that costs."""
    assert_close(found["lse"], expected["lse"], "rounding", name="lse")
    for name in variance:
        assert found[name].isfinite().all(), name
    assert_differ_by_roundings(found, expected, variance)


def assert_same(row: rows.TableRow, shape: tuple[int, ...], bias: Tensor, **options: Any) -> None:
    batch, queries, keys, *heads = shape
    tensors = inputs_of(row, batch, (queries, keys), (heads[0], heads[1]))
    how = {"backend": backend_of(row), "deterministic": True, **options}
    expected = results(attention, tensors, crooked(bias), **how)
    found = results(attention, tensors, aligned(bias), **how)
    assert_agree(found, expected, variances(tensors, bias, DTYPES[row.dtype], **options))


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_broadcasts(
    row: rows.TableRow, numbers: torch.dtype, shape: tuple[int, ...], kept: str
) -> None:
    """The same as without tiles, and as accurate as the formula by itself."""
    bias = bias_of(shape, kept, numbers)
    assert_same(row, shape, bias)
    batch, queries, keys, *heads = shape
    tensors = inputs_of(row, batch, (queries, keys), (heads[0], heads[1]))
    assert_exact(row, tensors, aligned(bias), {})


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_masks(
    row: rows.TableRow, numbers: torch.dtype, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    assert_same(row, shape, bias_of(shape, "bhqk", numbers), **options)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_against_the_formula(
    row: rows.TableRow, numbers: torch.dtype, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    batch, queries, keys, *heads = shape
    tensors = inputs_of(row, batch, (queries, keys), (heads[0], heads[1]))
    for kept in ("bhqk", "bk"):
        assert_exact(row, tensors, aligned(bias_of(shape, kept, numbers)), options)


@pytest.mark.parametrize("anything", [torch.nan, torch.inf, -torch.inf])
def test_hidden_numbers(row: rows.TableRow, numbers: torch.dtype, anything: float) -> None:
    """What a mask hides may be anything, and -infinity hides keys, of whole tiles too."""
    shape = (2, 300, 300, 4, 2)
    bias = bias_of(shape, "bhqk", numbers)
    bias[torch.rand_like(bias, dtype=torch.float) < 0.3] = -torch.inf
    bias[:, 1, :, 64:] = -torch.inf
    bias[:, 2] = -torch.inf
    hidden = torch.ones(300, 300, device="cuda", dtype=torch.bool).triu(1)
    poisoned, clean = bias.masked_fill(hidden, anything), bias.masked_fill(hidden, 0.0)
    assert_same(row, shape, poisoned, causal=True)
    batch, queries, keys, *heads = shape
    tensors = inputs_of(row, batch, (queries, keys), (heads[0], heads[1]))
    found = results(attention, tensors, aligned(poisoned), causal=True, backend=backend_of(row))
    exact = in_float64(tensors, {"bias": clean}, causal=True)
    assert_all_as_accurate(found, exact, in_pytorch(tensors, {"bias": clean}, causal=True))


@pytest.mark.parametrize("kept", ["bhqk", "bk"])
def test_many_tiles_of_keys(row: rows.TableRow, numbers: torch.dtype, kept: str) -> None:
    """As accurate as the formula by itself where buffers of the bias are filled many times."""
    shape = (1, 330, 3000, 2, 1)
    batch, queries, keys, *heads = shape
    tensors = inputs_of(row, batch, (queries, keys), (heads[0], heads[1]))
    assert_exact(row, tensors, aligned(bias_of(shape, kept, numbers)), {"causal": True})


def test_odd_scales(row: rows.TableRow, numbers: torch.dtype) -> None:
    shape = (1, 150, 203, 2, 2)
    for scale in (0.001, 3.0):
        assert_same(row, shape, bias_of(shape, "hqk", numbers), scale=scale)


def packed_variances(
    tensors: list[Tensor], ends: tuple[Tensor, Tensor], bias: Tensor, **options: Any
) -> dict[str, Tensor]:
    """variances() of packed sequences: those of each by itself, and their sum where sequences share
    a number of the bias."""
    q, k, v, grad_out = tensors
    rows_of = {"out": grad_out, "dq": q, "dk": k, "dv": v, "dbias": bias}
    found = {name: torch.zeros_like(t, dtype=torch.double) for name, t in rows_of.items()}
    for b in range(len(ends[0]) - 1):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in ends)
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        place = (slice(b, b + 1) if bias.shape[0] > 1 else slice(None), slice(None))
        place += (slice(rows.stop - rows.start), slice(keys.stop - keys.start))
        own = [t[at][None] for t, at in ((q, rows), (k, keys), (v, keys), (grad_out, rows))]
        of_sequence = variances(own, bias[place], q.dtype, **options)
        found["dbias"][place] += of_sequence.pop("dbias")
        for name, variance in of_sequence.items():
            found[name][rows if name in ("out", "dq") else keys] = variance[0]
    return found


@pytest.mark.parametrize("kept", ["bhqk", "hqk", "bk"])
def test_packed(row: rows.TableRow, numbers: torch.dtype, kept: str) -> None:
    """Sequence b has the first rows and columns of bias[b]; the rest is NaN."""
    lengths_q, lengths_k = (150, 0, 37, 1, 70), (203, 64, 0, 300, 70)
    ends = offsets(lengths_q), offsets(lengths_k)
    dense = inputs_of(row, 1, (sum(lengths_q) + 5, sum(lengths_k) + 9), (6, 2))
    tensors = [tensor[0] for tensor in dense]
    bias = bias_of((len(lengths_q), 150, 300, 6, 2), kept, numbers)
    if "b" in kept:
        for own, queries, keys in zip(bias, lengths_q, lengths_k, strict=True):
            own[..., keys:] = torch.nan
            if "q" in kept:
                own[:, queries:] = torch.nan

    def packed(*args: Any, **more: Any) -> Any:
        return attention_varlen(*args, *ends, 150, 300, **more)

    options = {"backend": backend_of(row), "deterministic": True}
    expected = results(packed, tensors, crooked(bias), causal=True, **options)
    found = results(packed, tensors, aligned(bias), causal=True, **options)
    assert_agree(found, expected, packed_variances(tensors, ends, bias, causal=True))
    exact = results(
        lambda *args, **more: attention_varlen_reference(*args, *ends, **more),
        [t.double() for t in tensors], bias.nan_to_num().double(), causal=True,
    )  # fmt: skip
    assert_close(found["lse"], exact["lse"].float(), "large_scores", name="lse")
    for name in found.keys() - {"lse"}:
        assert_near(found[name], exact[name], name)


def test_a_sequence_longer_than_the_bias(row: rows.TableRow, numbers: torch.dtype) -> None:
    """Each row of the output is right or NaN, and those of the other sequence are right. These may
    differ by a rounding at head dim 256: a call with longer sequences divides the keys, and tiles
    of fp32 have 32 keys there, so that both splits have some of that sequence."""
    lengths_q, lengths_k = (40, 100), (50, 200)
    ends = offsets(lengths_q), offsets(lengths_k)
    dense = inputs_of(row, 1, (sum(lengths_q), sum(lengths_k)), (2, 2))
    q, k, v = (tensor[0] for tensor in dense[:3])
    bias = bias_of((2, 100, 200, 2, 2), "bhqk", numbers)
    exact = attention_varlen(q, k, v, *ends, 100, 200, bias=bias, backend=backend_of(row))
    for longest in ((40, 200), (100, 64), (40, 64)):
        short = aligned(bias[:, :, : longest[0], : longest[1]])
        out = attention_varlen(q, k, v, *ends, *longest, bias=short, backend=backend_of(row))
        kept = ~out.isnan().flatten(1).any(1)
        assert kept[:40].all()
        if row.head_dim <= 128 or numbers != torch.float32:
            assert_same_bits(out[:40], exact[:40], "the sequence that fits")
        else:
            assert_close(out[:40], exact[:40], "stored", name="the sequence that fits")
        assert ((out - exact)[kept].abs() <= 0.01 * exact.abs().max()).all()


@pytest.mark.parametrize("layout", [aligned, crooked], ids=lambda layout: layout.__name__)
def test_which_kernel_runs(
    row: rows.TableRow, numbers: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    """The kernels of sm90 take tiles where TMA loads the bias; the backward above head dim 128 has
    no room for them. Tiles of fp32 have rows with a bias alone."""
    tensors = inputs_of(row, 1, (130, 130), (2, 2))
    bias = layout(bias_of((1, 130, 130, 2, 2), "hqk", numbers))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results(attention, tensors, bias, backend=backend_of(row))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    own = [name for name in names if row.name in name]
    assert own, names
    in_fp32 = numbers == torch.float32
    has_both = row.arch == "sm90" and (row.direction == "forward" or row.head_dim <= 128)
    has_float_tiles = has_both and len(row.score_mods) == 1
    in_tiles = layout is aligned and (has_float_tiles or not in_fp32)
    assert any("BiasFromGlobal" in name for name in own) == (has_both and not in_tiles)
    assert any("FloatBias" in name for name in own) == (has_float_tiles and in_tiles and in_fp32)


@pytest.mark.parametrize("layout", [aligned, crooked], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("kept", ["bhk", "bk", "k", "h", "hqk"])
def test_which_kernel_has_a_number_for_each_key(
    row: rows.TableRow, numbers: torch.dtype, kept: str, layout: Callable[[Tensor], Tensor]
) -> None:
    """Of sm90, rows with a bias alone, backward up to head dim 128: where all queries share it.
    Heads that share a tile of the forward must share it too. Of 16 bits, where TMA loads the
    bias, tiles are faster but in the forward of head dim 64."""
    for queries, heads in ((130, 2), (1, 8)):
        tensors = inputs_of(row, 2, (queries, 300), (heads, 2))
        bias = layout(bias_of((2, queries, 300, heads, 2), kept, numbers))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            results(attention, tensors, bias, backend=backend_of(row))
            torch.cuda.synchronize()
        names = [event.key for event in profile.key_averages() if row.name in event.key]
        is_forward = row.direction == "forward"
        has_it = len(row.score_mods) == 1 and (is_forward or row.head_dim <= 128)
        is_shared = ("h" not in kept or not is_forward) if queries == 1 else "q" not in kept
        in_tiles = numbers != torch.float32 and layout is aligned and "k" in kept
        is_faster = not in_tiles or (is_forward and row.head_dim == 64)
        expected = row.arch == "sm90" and has_it and is_shared and is_faster
        assert names and any("KeyBias" in name for name in names) == expected
        assert_exact(row, tensors, bias, {})
