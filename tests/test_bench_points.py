"""What the benchmark measures: points, grids, named sets, and the FLOPs of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention.bench.contenders import CONTENDERS
from cute_attention.bench.flops import counted_pairs, flops, visible_pairs
from cute_attention.bench.inputs import make_inputs
from cute_attention.bench.points import (
    Bounds,
    Grid,
    Point,
    lengths_point,
    pack_documents,
)
from cute_attention.bench.sets import SETS, named_set
from cute_attention.bench.visible import visible

CPU = torch.device("cpu")
POINT = Point(batch=2, heads=4, seqlen_q=32, head_dim=8, dtype="fp32")

BOUNDS = [Bounds(left, right) for left in (None, 0, 1, 3, 50) for right in (None, 0, 2, 50)]


@pytest.mark.parametrize("seqlens", [(1, 1), (7, 7), (5, 9), (9, 5), (1, 12), (12, 1)])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_visible_pairs_equals_the_mask_counted(seqlens: tuple[int, int], bounds: Bounds) -> None:
    mask = visible(*seqlens, bounds, CPU)
    expected = seqlens[0] * seqlens[1] if mask is None else int(mask.sum())
    assert visible_pairs(*seqlens, bounds) == expected


def test_mask_is_bottom_right_aligned() -> None:
    mask = visible(2, 3, Bounds(None, 0), CPU)
    assert mask is not None
    assert mask.int().tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("contender", ["plain", "math", "reference"])
def test_forward_flops_equal_those_torch_counts(contender: str) -> None:
    point = replace(POINT, head_dim_v=16)
    inputs = make_inputs(point, CPU)
    call = CONTENDERS[contender].build(point, inputs)
    with CONTENDERS[contender].scope(), FlopCounterMode(display=False) as counter:
        call(*inputs.detached)
    assert counter.get_total_flops() == flops(point, "fwd")


def test_backward_flops_equal_torchs_formula() -> None:
    point = replace(POINT, head_dim_v=16)
    q, k, v = ((2, 4, 32, dim) for dim in (8, 8, 16))
    assert flops(point, "bwd") == sdpa_backward_flop_count(v, q, k, v)


def test_flops_follow_the_papers_conventions() -> None:
    point = Point(batch=4, heads=16, seqlen_q=4096, head_dim=128)
    assert flops(point, "fwd") == 4 * 4 * 16 * 4096**2 * 128
    assert flops(point, "bwd") == 2.5 * flops(point, "fwd")
    assert flops(point, "fwdbwd") == 3.5 * flops(point, "fwd")
    assert flops(replace(point, causal=True), "bwd") == 0.5 * flops(point, "bwd")


def test_documents_count_by_themselves() -> None:
    packed = lengths_point((3, 5, 8), heads=2, head_dim=4, causal=True)
    assert counted_pairs(packed) == (9 + 25 + 64) / 2
    window = replace(packed, window=Bounds(1, None))
    assert counted_pairs(window) == (2 * 3 - 1) + (2 * 5 - 1) + (2 * 8 - 1)


def test_paper_grid() -> None:
    points = named_set("paper")
    assert len(points) == len(set(points)) == 36
    assert {p.batch * p.seqlen_q for p in points} == {16384}
    assert {p.heads * p.head_dim for p in points} == {2048}
    assert {(p.head_dim, p.mask) for p in points} == {
        (d, mask) for d in (64, 128, 256) for mask in ("full", "causal")
    }


@pytest.mark.parametrize("name", SETS)
def test_every_set_has_distinct_points(name: str) -> None:
    points = [point.key() for point in named_set(name)]
    assert len(points) == len(set(points)) > 0


def test_gqa_set_has_the_models_head_dims() -> None:
    deepseek = [p for p in named_set("gqa") if p.label == "DeepSeek-V3"]
    assert {(p.heads, p.heads_kv, p.head_dim, p.head_dim_v) for p in deepseek} == {
        (128, 128, 192, 128)
    }
    llama = next(p for p in named_set("gqa") if p.label == "Llama 3 8B")
    assert (llama.heads, llama.heads_kv) == (32, 8)


def test_windows_set_hides_keys_from_all_but_few_queries() -> None:
    points = {point.label: point for point in named_set("windows")}
    assert len(points) == 7
    # All but the first 4095 of 8192 queries see 4096 keys each.
    mistral = points["Mistral 7B"]
    assert counted_pairs(mistral) == 4096 * 4095 / 2 + (8192 - 4095) * 4096
    assert (mistral.heads, mistral.heads_kv) == (32, 8)


def test_models_set_has_the_models_shapes() -> None:
    points = {point.label: point for point in named_set("models")}
    assert len(points) == 30
    falcon, deepseek = points["Falcon 7B MQA"], points["DeepSeek 192/128 4k"]
    assert (falcon.heads, falcon.heads_kv, falcon.head_dim, falcon.mask) == (71, 1, 64, "causal")
    assert (deepseek.head_dim, deepseek.head_dim_v) == (192, 128)
    assert points["SD1.5 cross"].shape_text() == "4x4096:77 h8 d40"
    assert points["speculative 8 over 8k"].shape_text() == "16x8:8192 h32/8 d128"
    # The last 8 of 8192 positions see all keys but those after themselves.
    assert counted_pairs(points["speculative 8 over 8k"]) == 16 * (8 * 8192 - 28)
    assert {p.dtype for p in points.values()} == {"bf16"}


@pytest.mark.parametrize("mean", [64, 512, 2048])
def test_packed_documents_are_reproducible_and_exponential(mean: int) -> None:
    lengths = pack_documents(200 * mean, mean, seed=1)
    assert lengths == pack_documents(200 * mean, mean, seed=1)
    assert lengths != pack_documents(200 * mean, mean, seed=2)
    assert sum(lengths) == 200 * mean
    assert min(lengths[:-1]) >= 16
    assert 0.7 * mean < sum(lengths) / len(lengths) < 1.5 * mean
    shorter = sum(n < mean for n in lengths) / len(lengths)
    assert 0.5 < shorter < 0.75  # 1 - 1/e = 0.63 of an exponential lies below its mean


def test_packed_documents_stay_the_same_between_versions() -> None:
    assert pack_documents(1000, 200, seed=0) == (372, 284, 109, 60, 143, 32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 3, "heads_kv": 2},
        {"dtype": "fp8"},
        {"batch": 0},
        {"lengths": (3, 4)},
    ],
    ids=str,
)
def test_impossible_points_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(POINT, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "mask"),
    [
        ({}, "full"),
        ({"causal": True}, "causal"),
        ({"window": Bounds(None, 0)}, "causal"),
        ({"window": Bounds(4, None)}, "window 4,inf"),
        ({"window": Bounds(4, 7), "causal": True}, "window 4,0"),
    ],
    ids=str,
)
def test_mask_folds_causal_into_the_window(kwargs: dict[str, object], mask: str) -> None:
    assert replace(POINT, **kwargs).mask == mask  # type: ignore[arg-type]


def test_grid_fits_tokens_and_hidden() -> None:
    points = Grid((32, 64), ("full",), (64, 4096), tokens=1024, hidden=128).points()
    assert [(p.batch, p.heads) for p in points] == [(16, 4), (1, 4), (16, 2), (1, 2)]
