"""Every combination of softcap, ALiBi, bias and dropout, forward and backward, on a GPU, against
the formula in float64: on the row that dispatch takes, and again where there are only rows that
serve every combination."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen, explain
from cute_attention.native import rows
from every_row import ALL, DTYPES, LIMIT, ONLY, SMALL_CHIP, is_built, run_alone, slopes_of
from kernel_calls import assert_all_as_accurate, in_float64, in_pytorch, offsets, results
from tolerances import assert_same_bits, error

pytestmark = pytest.mark.gpu

HEAD_DIMS = (40, 64, 128, 256)  # the first runs on a row of 64, and is filled up on the chip
SUBSETS = [subset for count in range(5) for subset in itertools.combinations(rows.EVERY, count)]
BATCH, QUERIES, KEYS = 2, 150, 203
CALLS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {  # heads and KV heads, and options
    "causal, grouped heads": ((6, 2), {"causal": True}),
    "window": ((4, 4), {"window": (40, 17)}),
    "sink": ((4, 2), {"sink": True}),
    "deterministic": ((4, 4), {"deterministic": True}),
}
LENGTHS_Q, LENGTHS_K = (100, 0, 64, 37), (130, 50, 0, 200)
SOFTCAP = 2.0  # many scores come near it


@pytest.fixture(params=["sm80", "sm90"])
def arch(request: pytest.FixtureRequest) -> str:
    """A family of which the rows that serve every combination are built: those of the test's head
    dim and dtype, or all where it has none."""
    own = [row for row in ALL if row.arch == request.param and row.serves_subsets()]
    usual = [row for row in own if not row.name.endswith("_99kb")]
    given = request.node.callspec.params
    if "dim" in given:
        dims = [row.head_dim for row in usual if row.head_dim >= given["dim"]]
        usual = [row for row in usual if row.head_dim == min(dims)]
    if "dtype" in given:
        usual = [row for row in usual if row.dtype == given["dtype"]]
    if not usual or not all(is_built(row) for row in usual):
        pytest.skip(f"not all such rows of {request.param} are built")
    if request.param == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("rows of sm90 need a GPU of compute capability 9.0")
    return request.param


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def tensors_of(heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    lengths = (QUERIES, KEYS, KEYS, QUERIES)
    own = (heads[0], heads[1], heads[1], heads[0])
    return [normal(BATCH, n, h, dim, dtype=dtype) for n, h in zip(lengths, own, strict=True)]


def bias_of(batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Random numbers in rows that begin at multiples of 16 bytes, with NaN between them. A tenth is
    -infinity, and so is a whole row, whose query sees no key."""
    wide = torch.full((batch, heads, queries, keys + -keys % 8 + 8), torch.nan, device="cuda")
    wide = wide.to(dtype)
    bias = wide[..., :keys]
    bias.copy_(normal(batch, heads, queries, keys, dtype=dtype))
    bias[torch.rand(bias.shape, device="cuda") < 0.1] = -torch.inf
    bias[:, 1, queries // 2] = -torch.inf
    return bias


def crooked(bias: Tensor) -> Tensor:
    """The same numbers where rows begin at odd addresses."""
    wide = torch.full((*bias.shape[:-1], bias.shape[-1] + 3), torch.nan, device="cuda")
    wide = wide.to(bias.dtype)
    wide[..., 1:-2] = bias
    return wide[..., 1:-2]


def options_of(subset: tuple[str, ...], heads: int) -> dict[str, Any]:
    """The options of all features of a subset but the bias."""
    options: dict[str, Any] = {}
    if "softcap" in subset:
        options["softcap"] = SOFTCAP
    if "alibi" in subset:
        options["alibi_slopes"] = slopes_of(heads)
    if "dropout" in subset:
        options |= {"dropout_p": 0.3, "dropout_seed": 1234567890123}
    return options


def check(
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    pytorch: dict[str, Tensor],
    name: str,
) -> None:
    of_tensors = {result: t for result, t in found.items() if result != "dsink"}
    for result in of_tensors.keys() - {"lse"}:
        assert found[result].isfinite().all(), f"{name}: {result}"
    assert_all_as_accurate(of_tensors, exact, pytorch, name)
    if "dsink" in found:
        limit = 8 * torch.finfo(found["out"].dtype).eps
        assert error(found["dsink"].double(), exact["dsink"].double()) < limit, f"{name}: dsink"


def each_subset(
    heads: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
    """Of each subset its name, what is learnt, and its options; `shape` is of the bias: batch,
    queries and keys."""
    batch, queries, keys = shape
    for subset in SUBSETS:
        learnt = {}
        if "bias" in subset:
            learnt["bias"] = bias_of(batch, heads, queries, keys, dtype)
        yield "+".join(subset) or "plain", learnt, options_of(subset, heads)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_dense(arch: str, dim: int, dtype: str, call: str) -> None:
    heads, given = CALLS[call]
    tensors = tensors_of(heads, dim, DTYPES[dtype])
    shape = (BATCH, QUERIES, KEYS)
    for name, learnt, options in each_subset(heads[0], shape, DTYPES[dtype]):
        options |= given
        if options.pop("sink", False):
            learnt["sink"] = torch.randn(heads[0], device="cuda")
        deterministic = options.pop("deterministic", False)
        found = results(
            attention, tensors, learnt, backend=arch, deterministic=deterministic, **options
        )
        exact = in_float64(tensors, learnt, **options)
        check(found, exact, in_pytorch(tensors, learnt, **options), name)
        if deterministic:
            again = results(attention, tensors, learnt, backend=arch, deterministic=True, **options)
            for result in found:
                assert_same_bits(again[result], found[result], f"{name}: {result}")


def entry(source: Tensor, batch: int) -> Tensor:
    """`source` as the last entry of a batch, where dropout draws other bits; the rest is 0."""
    dense = source.new_zeros((batch + 1, *source.shape))
    dense[batch] = source
    return dense


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_packed(arch: str, dim: int, dtype: str) -> None:
    """Neighbours do not reach each other: rows of no sequence, and the numbers of a bias that its
    sequence does not have, are NaN, and what a sequence gets is what it gets alone."""
    heads, kv = 4, 2
    ends = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    shapes = ((total_q + 9, heads), (total_k + 9, kv), (total_k + 9, kv), (total_q + 9, heads))
    tensors = [normal(n, h, dim, dtype=DTYPES[dtype]) for n, h in shapes]
    for tensor, total in zip(tensors, (total_q, total_k, total_k, total_q), strict=True):
        tensor[total:] = torch.nan
    longest = max(LENGTHS_Q), max(LENGTHS_K)

    def packed(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return attention_varlen(q, k, v, *ends, *longest, backend=arch, causal=True, **more)

    shape = (len(LENGTHS_Q), *longest)
    for name, learnt, options in each_subset(heads, shape, DTYPES[dtype]):
        for b, (queries, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
            if "bias" in learnt:
                learnt["bias"][b, :, queries:] = torch.nan
                learnt["bias"][b, ..., keys:] = torch.nan
        found = results(packed, tensors, learnt, **options)
        assert found["out"].isfinite().all() and not found["out"][total_q:].any(), name
        for b, (queries, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
            place_q = slice(int(ends[0][b]), int(ends[0][b]) + queries)
            place_k = slice(int(ends[1][b]), int(ends[1][b]) + keys)
            places = (place_q, place_k, place_k, place_q)
            own = {
                "out": found["out"][place_q],
                "lse": found["lse"][:, place_q],
                "dq": found["dq"][place_q],
                "dk": found["dk"][place_k],
                "dv": found["dv"][place_k],
            }
            alone = [entry(t[place], b) for t, place in zip(tensors, places, strict=True)]
            own_learnt = {}
            if "bias" in learnt:
                own["dbias"] = found["dbias"][b, :, :queries, :keys]
                assert not found["dbias"][b, :, queries:].any(), name
                assert not found["dbias"][b, ..., keys:].any(), name
                own_learnt["bias"] = entry(learnt["bias"][b, :, :queries, :keys], b)
            if queries == 0 or keys == 0:
                assert not any(own[result].any() for result in own.keys() - {"lse"}), name
                continue
            exact = in_float64(alone, own_learnt, causal=True, **options)
            pytorch = in_pytorch(alone, own_learnt, causal=True, **options)
            last = [{result: t[b] for result, t in r.items()} for r in (exact, pytorch)]
            check(own, *last, f"{name}, sequence {b}")


@pytest.mark.parametrize("layout", ["crooked", "float32", "shared", "keys"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_layouts_of_the_bias(arch: str, dim: int, dtype: str, layout: str) -> None:
    """A bias that no tiles can be loaded of, one whose gradient is a sum over the batch, and one
    that all queries share, as a mask of keys is."""
    tensors = tensors_of((4, 2), dim, DTYPES[dtype])
    batch = 1 if layout == "shared" else BATCH
    for name, learnt, options in each_subset(4, (batch, QUERIES, KEYS), DTYPES[dtype]):
        if "bias" not in learnt:
            continue
        if layout == "crooked":
            learnt["bias"] = crooked(learnt["bias"])
        elif layout == "float32":
            learnt["bias"] = learnt["bias"].float()
        elif layout == "keys":
            learnt["bias"] = learnt["bias"][:, :1, :1].float()
        found = results(attention, tensors, learnt, backend=arch, causal=True, **options)
        exact = in_float64(tensors, learnt, causal=True, **options)
        check(found, exact, in_pytorch(tensors, learnt, causal=True, **options), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_hidden_numbers_of_a_bias_are_not_seen(arch: str, dim: int, dtype: str) -> None:
    """What a mask hides may have any bias, with a map too."""
    tensors = tensors_of((4, 2), dim, DTYPES[dtype])
    hidden = torch.ones(QUERIES, KEYS, device="cuda", dtype=torch.bool)
    hidden = hidden.triu(1 + KEYS - QUERIES)
    for name, learnt, options in each_subset(4, (BATCH, QUERIES, KEYS), DTYPES[dtype]):
        if "bias" not in learnt:
            continue
        options |= {"backend": arch, "causal": True, "deterministic": True}
        expected = results(attention, tensors, learnt, **options)
        for anything in (torch.nan, torch.inf, -torch.inf):
            learnt["bias"][:, :, hidden] = anything
            found = results(attention, tensors, learnt, **options)
            for result in found:
                assert_same_bits(found[result], expected[result], f"{name}: {result}")


@pytest.mark.parametrize("subset", [("bias", "dropout"), rows.EVERY], ids="+".join)
@pytest.mark.parametrize("dtype", ["bf16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_thousand_repeats_have_the_same_bits(
    arch: str, dim: int, dtype: str, subset: tuple[str, ...]
) -> None:
    """Output and all gradients, that of a bias which all sequences share among them, where
    determinism is asked: several blocks of keys add to each dQ, and CTAs compete for work."""
    tensors = tensors_of((4, 2), dim, DTYPES[dtype])
    bias = bias_of(1, 4, QUERIES, KEYS, DTYPES[dtype])
    options = {"backend": arch, "deterministic": True, **options_of(subset, 4)}
    first = results(attention, tensors, {"bias": bias}, **options)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again = results(attention, tensors, {"bias": bias}, **options)
        for name in first:
            bits = torch.int32 if first[name].dtype == torch.float32 else torch.int16
            differences += (again[name].view(bits) != first[name].view(bits)).sum()
    assert not differences


@pytest.mark.skipif(ONLY in os.environ, reason="rows are chosen from outside")
def test_dispatch_takes_the_row_of_every_combination_last(arch: str) -> None:
    q = normal(1, 130, 4, 64, dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(130, 130, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for subset in SUBSETS:
        options = options_of(subset, 4) | ({"bias": bias} if "bias" in subset else {})
        answer = explain(q, q, q, backend=arch, **options)
        assert (answer.chosen, answer.chosen_backward) == (arch, arch)
        for reports, direction in ((answer.forward, "forward"), (answer.backward, "backward")):
            report = next(report for report in reports if report.backend == arch)
            (name,) = [candidate.name for candidate in report.rows if candidate.chosen]
            exact = any(
                (row.arch, row.direction, row.dtype) == (arch, direction, "bf16")
                and row.score_mods == subset
                and is_built(row)
                and not row.name.endswith("_99kb")
                for row in ALL
            )
            assert name.endswith("_every") != (exact and subset != rows.EVERY), subset


@pytest.mark.skipif(ONLY in os.environ, reason="rows are chosen from outside")
@pytest.mark.skipif(LIMIT in os.environ, reason="other rows are for such chips")
@pytest.mark.parametrize(
    "file",
    [
        Path(__file__).name,
        "test_bias.py",
        "test_bias_tiles.py",
        "test_grad_bias.py",
        "test_dropout_kernels.py",
    ],
)
def test_calls_with_a_part_of_the_features_on_these_rows(arch: str, file: str) -> None:
    """Runs a file in a process that has no rows but these. Tests of one feature have calls with it
    alone."""
    select = arch if file == Path(__file__).name else f"{arch} and every"
    run_alone([str(Path(__file__).with_name(file))], select, {ONLY: "_every$"})


@pytest.mark.skipif(ONLY in os.environ, reason="rows are chosen from outside")
@pytest.mark.skipif(LIMIT in os.environ, reason="runs the others in a process of their own")
def test_rows_for_chips_of_99_kb() -> None:
    """The rows that such a chip gets, of which some are also for others."""
    own = [row for row in ALL if row.arch == "sm80" and row.serves_subsets()]
    if not all(is_built(row) for row in own):
        pytest.skip("not all such rows are built")
    select = "sm80 and (dense or packed or layouts or hidden)"
    run_alone([__file__], select, {LIMIT: SMALL_CHIP})
