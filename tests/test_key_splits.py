"""Keys divided among CTAs (splits), on a GPU: every forward row with any number of splits, against
the formula in float64."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen, attention_varlen_reference
from cute_attention.native import core, rows
from cute_attention.semantics.formula import attention_reference
from every_row import DTYPES, backend_of, fixture_of, is_built
from kernel_calls import (
    CASES,
    CAUSAL,
    Case,
    case_inputs,
    check_forward,
    offsets,
    options_for,
    packed_inputs,
    plain_pytorch,
    poison_free_memory,
)
from test_kernels import FORWARD
from test_packed import test_a_short_max_seqlen_leaves_no_row_unwritten as check_short_max_seqlen
from test_sinks import sinks
from test_sizes import BFLOAT16, ForwardParams, garbage, set_shape, set_tensor
from tolerances import assert_as_accurate, assert_close, assert_near, assert_same_bits

SPLITS = "CUTE_ATTENTION_SPLITS"
MOST = 128  # kMostSplits of params.h
gpu = pytest.mark.gpu
row = fixture_of(FORWARD)

OWN_CASES = {
    name: CASES[name]
    for name in (
        "one_token", "ragged_causal", "decode", "queries_longer_than_keys", "mqa", "gqa_decode",
        "mqa_of_more_heads_than_rows", "gqa_short_window", "window", "window_without_keys",
        "huge_logits", "growing_maximum",
    )
} | {
    "many_keys": Case(1, 70, 5000, 6, 2, {}),
    "many_keys_causal": Case(2, 300, 3001, 4, 2, CAUSAL),
}  # fmt: skip


class Workspace(ctypes.Structure):
    """ForwardWorkspace of params.h."""

    _fields_ = [("split_workspace", ctypes.c_int64), ("num_splits", ctypes.c_int32)]


def workspace_of(params: ForwardParams, arch: int) -> Workspace:
    """What the C API asks for, for a call in bf16 on device 0."""
    sizes = Workspace()
    error = core.core().cute_attention_forward_workspace(
        ctypes.byref(params), BFLOAT16, arch, 0, ctypes.byref(sizes)
    )
    if error:
        raise RuntimeError(core.core().cute_attention_last_error().decode())
    return sizes


@pytest.mark.skipif(not core.available(), reason="the core is not built")
@pytest.mark.parametrize("splits", [-1, MOST + 1])
def test_a_number_of_splits_that_there_is_not(splits: int) -> None:
    """Also without a GPU: shapes are checked before a device is looked for."""
    params = ForwardParams()
    set_shape(params, 1, 64, 64)
    params.num_splits = splits
    with pytest.raises(RuntimeError, match=f"num_splits is {splits}, expected 0 to {MOST}"):
        workspace_of(params, 0)


@gpu
@pytest.mark.parametrize("splits", [2, 3, 7, 64])
@pytest.mark.parametrize("case", OWN_CASES.values(), ids=OWN_CASES.keys())
def test_accuracy(
    row: rows.TableRow, case: Case, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most calls have fewer KV tiles than 64, and so splits without keys."""
    monkeypatch.setenv(SPLITS, str(splits))
    options = options_for(row, case.options, case.heads)
    inputs = case_inputs(row, case)
    poison_free_memory()
    check_forward(inputs, row.arch, **options)


@gpu
@pytest.mark.parametrize("name", ["gqa_decode", "window_without_keys", "many_keys_causal"])
def test_sinks(row: rows.TableRow, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink joins a row once, also one that sees no key."""
    monkeypatch.setenv(SPLITS, "3")
    case = OWN_CASES[name]
    options = options_for(row, case.options, case.heads)
    check_forward(case_inputs(row, case), row.arch, sink=sinks(case.heads), **options)


@gpu
@pytest.mark.parametrize("splits", [3, 64])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
def test_packed(
    row: rows.TableRow, sink: bool, causal: bool, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty sequences, sequences without keys, and NaN in the rows of no sequence."""
    monkeypatch.setenv(SPLITS, str(splits))
    heads = 6
    options = options_for(row, {"causal": causal}, heads)
    if sink:
        options["sink"] = sinks(heads)
    lengths_q, lengths_k = [0, 5, 130, 0, 257, 64, 9], [3, 0, 800, 0, 129, 1500, 0]
    ends = offsets(lengths_q), offsets(lengths_k)
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    inputs = packed_inputs(row, (total_q, total_k), (heads, 2), padding=50)
    poison_free_memory()
    out, lse = attention_varlen(
        *inputs, *ends, max(lengths_q), max(lengths_k), backend=row.arch, return_lse=True,
        **options,
    )  # fmt: skip
    assert bool(out[total_q:].eq(0).all()) and bool(lse[:, total_q:].isneginf().all())
    mine = [t[:total] for t, total in zip(inputs, (total_q, total_k, total_k), strict=True)]
    exact, exact_lse = attention_varlen_reference(
        *(t.double() for t in mine), *ends, return_lse=True, **options
    )
    assert_close(lse[:, :total_q], exact_lse.float(), "rounding", name="lse")
    assert_near(out[:total_q], exact, "out", 2**-6)


@gpu
@pytest.mark.parametrize("longest", [(64, 500), (629, 64), (1, 1), (0, 500)], ids=str)
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_a_short_max_seqlen(
    backend: str, longest: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a sequence that is longer than max_seqlen are right or NaN, with splits too."""
    monkeypatch.setenv(SPLITS, "3")
    check_short_max_seqlen(backend, longest, True, False)


@gpu
def test_scores_that_hide_keys(row: rows.TableRow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of -1e30 are all alike, so the output is the mean of the values. An LSE does not show
    how many keys a split has."""
    if set(row.score_mods) & {"softcap", "alibi", "bias", "dropout"}:
        pytest.skip("the row changes the scores")
    monkeypatch.setenv(SPLITS, "3")
    dtype, keys = torch.bfloat16, 4 * 128 + 1
    if DTYPES[row.dtype] != dtype:
        pytest.skip("fp16 has no such number")
    q = torch.zeros(1, 5, 2, row.head_dim, device="cuda", dtype=dtype)
    k = torch.zeros(1, keys, 2, row.head_dim, device="cuda", dtype=dtype)
    q[..., 0], k[..., 0] = 1.0, -1e30
    v = torch.zeros(1, keys, 2, row.head_dim_v, device="cuda", dtype=dtype)
    v[:, : keys // 2] = 1.0
    out, lse = attention(q, k, v, backend=row.arch, return_lse=True)
    assert_close(out.float(), torch.full_like(out.float(), keys // 2 / keys), "stored", dtype)
    assert bool((lse < -1e28).all())


@gpu
@pytest.mark.parametrize("where", ["score", "value"])
def test_nan_stays_in_its_row(
    row: rows.TableRow, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in a query reaches its row alone, one in a value all rows that see it."""
    monkeypatch.setenv(SPLITS, "4")
    q, k, v = case_inputs(row, Case(1, 40, 700, 2, 2, {}))
    options = options_for(row, {}, 2)
    (q[0, 3, 1] if where == "score" else v[0, 650, 1]).fill_(math.nan)
    out, lse = attention(q, k, v, backend=row.arch, return_lse=True, **options)
    expected = torch.zeros(1, 40, 2, dtype=torch.bool, device="cuda")
    expected[0, 3 if where == "score" else slice(None), 1] = True
    if where == "value" and "dropout" in row.score_mods:  # 0 * NaN or the row does not read it
        assert not bool(out[:, :, 0].isnan().any())
        return
    assert torch.equal(out.isnan().all(-1), expected) and torch.equal(out.isnan().any(-1), expected)
    if where == "score":
        assert torch.equal(lse.isnan().transpose(1, 2), expected)
    else:
        assert not bool(lse.isnan().any())


@gpu
def test_repeats_bitwise_and_in_a_graph(
    row: rows.TableRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense and packed. A graph has memory of its own for the workspace."""
    monkeypatch.setenv(SPLITS, "5")
    q, k, v = case_inputs(row, Case(2, 9, 3000, 8, 2, {}))
    options = options_for(row, CAUSAL, 8)
    ends = offsets([9, 9]), offsets([3000, 3000])
    flat = [t.flatten(0, 1) for t in (q, k, v)]

    def run() -> list[Tensor]:
        dense = attention(q, k, v, backend=row.arch, return_lse=True, **options)
        packed = attention_varlen(
            *flat, *ends, 9, 3000, backend=row.arch, return_lse=True, **options
        )
        return [*dense, *packed]

    first = run()
    for _ in range(20):
        for again, expected in zip(run(), first, strict=True):
            assert_same_bits(again, expected, "again")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for tensor in captured:
            tensor.fill_(math.nan)
        graph.replay()
        for again, expected in zip(captured, first, strict=True):
            assert_same_bits(again, expected, "replayed")


@gpu
def test_gradients(row: rows.TableRow, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the output and the LSE of the combined splits."""
    monkeypatch.setenv(SPLITS, "4")
    case = Case(1, 60, 900, 4, 2, CAUSAL)
    options = options_for(row, case.options, case.heads)
    inputs = case_inputs(row, case)
    grad = torch.randn(1, 60, 4, row.head_dim_v, device="cuda").to(DTYPES[row.dtype])

    def gradients(function: Any, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = function(*leaves)
        return torch.autograd.grad(out, leaves, grad.to(out.dtype))

    found = gradients(
        lambda q, k, v: attention(q, k, v, backend=backend_of(row), **options), list(inputs)
    )
    exact = gradients(
        lambda q, k, v: attention_reference(q, k, v, **options), [t.double() for t in inputs]
    )
    plain = gradients(lambda q, k, v: plain_pytorch(q, k, v, options)[0], list(inputs))
    for name, ours, one, other in zip(("dq", "dk", "dv"), found, exact, plain, strict=True):
        assert_as_accurate(ours, one, other.nan_to_num(), name)


ARCHS = [pytest.param(arch, marks=gpu) for arch in ("sm80", "sm90")]


def skip_unless_built(arch: str) -> None:
    table = {row.name: row for row in FORWARD}
    if not is_built(table[f"{arch}_fwd_bf16_d64"]):
        pytest.skip(f"no {arch} kernels are built")
    if arch == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm90 kernels need a GPU of compute capability 9.0")


def launch(params: ForwardParams, arch: str) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = core.core().cute_attention_forward(
        ctypes.byref(params), BFLOAT16, int(arch.removeprefix("sm")), 0, stream
    )
    assert error == 0, core.core().cute_attention_last_error().decode()
    torch.cuda.synchronize()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("with_lse", [False, True], ids=["output", "lse"])
def test_the_c_api(arch: str, with_lse: bool) -> None:
    """A workspace of NaN of just the size that is asked for, an output with strides, between whose
    rows nothing is written, and no number that the host reads."""
    skip_unless_built(arch)
    heads, dim, queries, keys = 4, 64, 33, 2500
    q = torch.randn(2, queries, heads, dim, device="cuda").bfloat16()
    k, v = (torch.randn(2, keys, 2, dim, device="cuda").bfloat16() for _ in range(2))
    memory = torch.full((2, queries, 2 * heads, dim + 8), 7.0, device="cuda", dtype=q.dtype)
    out = memory[:, :, ::2, :dim]
    lse = garbage(2, heads, queries, dtype=torch.float32)
    params = ForwardParams()
    set_shape(params, 2, queries, keys)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("o", out)):
        set_tensor(params, name, tensor)
    params.lse = lse.data_ptr() if with_lse else None
    params.num_splits = 6
    sizes = workspace_of(params, int(arch.removeprefix("sm")))
    assert sizes.num_splits == 6
    assert sizes.split_workspace == 6 * 2 * heads * queries * (dim + 2)
    guarded = garbage(sizes.split_workspace + 1024, dtype=torch.float32)
    guarded[sizes.split_workspace :] = 5.0
    params.split_workspace = guarded.data_ptr()
    launch(params, arch)
    assert bool(guarded[sizes.split_workspace :].eq(5.0).all())
    exact, exact_lse = attention_reference(
        q.double(), k.double(), v.double(), scale=0.125, return_lse=True
    )
    plain, _ = plain_pytorch(q, k, v, {"scale": 0.125})
    assert_as_accurate(out, exact, plain, "out")
    if with_lse:
        assert_close(lse, exact_lse.float(), "rounding", name="lse")
    out.fill_(7.0)
    assert bool(memory.eq(7.0).all())


@pytest.mark.parametrize("arch", ARCHS)
def test_the_choice(arch: str) -> None:
    """Few queries over many keys are divided, and calls that fill the GPU are not."""
    skip_unless_built(arch)
    number = int(arch.removeprefix("sm"))
    params = ForwardParams()
    set_shape(params, 1, 1, 65536)
    assert workspace_of(params, number).num_splits > 4
    set_shape(params, 1, 1, 64)
    assert workspace_of(params, number).num_splits == 1
    set_shape(params, 64, 4096, 4096)
    sizes = workspace_of(params, number)
    assert (sizes.num_splits, sizes.split_workspace) == (1, 0)
    set_shape(params, 1, 1, 65536)
    params.num_splits = 1
    assert workspace_of(params, number).num_splits == 1


@pytest.mark.parametrize("arch", ARCHS)
def test_a_chosen_number_is_right(arch: str) -> None:
    """What a call does by itself, with few queries and many keys."""
    skip_unless_built(arch)
    q = torch.randn(1, 1, 8, 64, device="cuda").bfloat16()
    k, v = (torch.randn(1, 60000, 2, 64, device="cuda").bfloat16() for _ in range(2))
    out, lse = attention(q, k, v, backend=arch, return_lse=True)
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), return_lse=True)
    assert_as_accurate(out, exact, plain_pytorch(q, k, v, {})[0], "out")
    assert_close(lse, exact_lse.float(), "rounding", name="lse")


@pytest.mark.parametrize("splits", [9, 24])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ARCHS)
def test_many_rows(arch: str, head_dim: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than src/combine_splits.cu has warps for: no warps share one, and each adds up the
    members of a team, of which 9 splits have two. Of 24, for which 16 threads have two weights
    each, some see no key."""
    skip_unless_built(arch)
    monkeypatch.setenv(SPLITS, str(splits))
    heads, queries = 8, 66560 // head_dim  # 8320 rows of 64 columns, or 4160 of 128
    torch.manual_seed(0)
    q = torch.randn(1, queries, heads, head_dim, device="cuda").bfloat16()
    k, v = (torch.randn(1, 1100, heads, head_dim, device="cuda").bfloat16() for _ in range(2))
    poison_free_memory()
    out, lse = attention(q, k, v, backend=arch, return_lse=True)
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), return_lse=True)
    assert_as_accurate(out, exact, plain_pytorch(q, k, v, {})[0], "out")
    assert_close(lse, exact_lse.float(), "rounding", name="lse")
