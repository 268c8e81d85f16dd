"""Contenders from other packages, with stand-ins for the packages: what they are called with."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention.bench import accuracy, machine
from cute_attention.bench.contenders import CONTENDERS, flash_attn_3
from cute_attention.bench.contenders.base import CannotRun
from cute_attention.bench.inputs import Inputs, make_inputs
from cute_attention.bench.points import Bounds, Point, lengths_point
from cute_attention.bench.visible import visible

CPU = torch.device("cpu")
POINT = Point(batch=2, heads=4, seqlen_q=24, head_dim=16, dtype="fp32")

CASES = {
    "full": POINT,
    "causal": replace(POINT, causal=True),
    "fewer-queries": replace(POINT, causal=True, seqlen_q=8),
    "gqa": replace(POINT, heads_kv=1, causal=True),
    "window": replace(POINT, window=Bounds(5, 2)),
    "causal-window": replace(POINT, causal=True, window=Bounds(5, None)),
    "dims": replace(POINT, head_dim_v=8),
    "packed": lengths_point((7, 1, 24), heads=4, head_dim=8, causal=True, dtype="fp32"),
}

# The ops as FlashAttention-3 declares them, letter by letter.
FORWARD = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,"
    "Tensor? q_v = None,Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,"
    "Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,"
    "Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,"
    "Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,"
    "Tensor? rotary_cos = None,Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,"
    "Tensor? q_descale = None,Tensor? k_descale = None,Tensor? v_descale = None,"
    "float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,"
    "int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,"
    "bool is_rotary_interleaved = False,Tensor? scheduler_metadata = None,int num_splits = 0,"
    "bool? pack_gqa = None,int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "bwd(Tensor dout,Tensor q,Tensor k,Tensor v,Tensor out,Tensor softmax_lse,"
    "Tensor(dq!)? dq = None,Tensor(dk!)? dk = None,Tensor(dv!)? dv = None,"
    "Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? seqused_q = None,"
    "Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,"
    "float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,"
    "int window_size_right = -1,float softcap = 0.0,bool deterministic = False,"
    "int sm_margin = 0) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor,"
    " Tensor)"
)


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of one batch of dense tensors. -1 in a window is unbounded, as in flash-attn."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    left, right = (None if side < 0 else side for side in window)
    mask = visible(q.shape[1], k.shape[1], Bounds(left, 0 if causal else right), CPU)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def on_documents(
    tensors: tuple[torch.Tensor, ...], cu_seqlens: torch.Tensor | None, **mask: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if cu_seqlens is None:
        return formula(*tensors, **mask)
    lengths = cu_seqlens.diff().tolist()
    documents = zip(*(x[None].split(lengths, 1) for x in tensors), strict=True)
    parts = [formula(*document, **mask) for document in documents]
    return torch.cat([p[0] for p in parts], 1)[0], torch.cat([p[1] for p in parts], 2)[0]


def by_name(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation of an op that gets every argument by its name in the schema."""
    arguments = torch._C.parse_schema(schema).arguments

    def call(*given: Any) -> Any:
        defaults = {a.name: a.default_value for a in arguments}
        return function(**defaults | {a.name: x for a, x in zip(arguments, given, strict=False)})

    return call


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """torch.ops.flash_attn_3 as the formula; the list has the named arguments of each call."""
    calls: list[dict[str, Any]] = []

    def visibility(given: dict[str, Any]) -> dict[str, Any]:
        window = given["window_size_left"], given["window_size_right"]
        assert given["softmax_scale"] == given["q"].shape[-1] ** -0.5
        return {"causal": given["is_causal"], "window": window}

    def forward(**given: Any) -> Any:
        calls.append(given)
        tensors = given["q"], given["k"], given["v"]
        out, lse = on_documents(tensors, given["cu_seqlens_q"], **visibility(given))
        return out, lse, torch.empty(0), torch.empty(0)

    def backward(**given: Any) -> Any:
        calls.append(given)
        grads = given["dq"], given["dk"], given["dv"]
        with torch.enable_grad():
            leaves = [given[name].detach().requires_grad_() for name in ("q", "k", "v")]
            out, lse = on_documents(tuple(leaves), given["cu_seqlens_q"], **visibility(given))
            torch.testing.assert_close(out.detach(), given["out"])
            torch.testing.assert_close(lse.detach(), given["softmax_lse"])
            for grad, value in zip(
                grads, torch.autograd.grad(out, leaves, given["dout"]), strict=True
            ):
                grad.copy_(value)
        return (*grads, *(torch.empty(0) for _ in range(5)))

    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FORWARD)
    library.define(BACKWARD)
    library.impl("fwd", by_name(FORWARD, forward), "CPU")
    library.impl("bwd", by_name(BACKWARD, backward), "CPU")
    path = tmp_path / "fa3.so"
    path.touch()
    monkeypatch.setenv(flash_attn_3.VARIABLE, str(tmp_path))
    monkeypatch.setattr(flash_attn_3, "load", lambda found: calls.append({"loaded": found}))
    yield calls
    library._destroy()


@pytest.mark.parametrize("case", CASES)
def test_library_of_flash_attention_3_computes_attention(
    ops: list[dict[str, Any]], tmp_path: Path, case: str
) -> None:
    """The contender calls the ops so that they mean the point: masks, packing, order of tensors."""
    point, contender = CASES[case], CONTENDERS["fa3"]
    inputs = make_inputs(point, CPU)
    expected = accuracy.truth(point, inputs)
    call = contender.build(point, inputs)
    assert ops.pop() == {"loaded": tmp_path / "fa3.so"}
    out = call(*inputs.leaves)
    grads = torch.autograd.grad(out, inputs.leaves, inputs.grad_out)
    for result, key in zip((out, *grads), ("out", "dq", "dk", "dv"), strict=True):
        assert accuracy.errors(result, expected[key])["rms_error"] < 1e-5
    _, lse = contender.build_with_lse(point, inputs)(*inputs.detached)
    assert accuracy.errors(lse, expected["lse"])["max_error"] < 1e-5


def test_library_of_flash_attention_3_is_told_splits_and_determinism(
    ops: list[dict[str, Any]],
) -> None:
    point = replace(POINT, deterministic=True)
    inputs = make_inputs(point, CPU)
    call = CONTENDERS["fa3"].build(point, inputs)
    ops.clear()
    call(*inputs.detached)
    assert ops.pop()["num_splits"] == 0  # the library chooses, as nothing is to be differentiated
    out = call(*inputs.leaves)
    assert ops.pop()["num_splits"] == 1
    torch.autograd.grad(out, inputs.leaves, inputs.grad_out)
    assert ops.pop()["deterministic"] is True


def test_library_of_flash_attention_3_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(flash_attn_3.VARIABLE, raising=False)
    assert flash_attn_3.library() is None
    assert "flash-attn-3" not in machine._peers()
    monkeypatch.setenv(flash_attn_3.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"there is no \*\.so"):
        flash_attn_3.library()
    assert "flash-attn-3" not in machine._peers()
    (tmp_path / "libcudart.so.12").touch()
    (tmp_path / "fa3.so").write_bytes(b"12345")
    assert flash_attn_3.library() == tmp_path / "fa3.so"
    assert machine._peers()["flash-attn-3"] == "fa3.so, 5 bytes"
    (tmp_path / "other.so").touch()
    with pytest.raises(ValueError, match=r"fa3\.so, other\.so\): name one"):
        flash_attn_3.library()
    monkeypatch.setenv(flash_attn_3.VARIABLE, str(tmp_path / "other.so"))
    assert flash_attn_3.library() == tmp_path / "other.so"
    (tmp_path / "libcudart.so.12").unlink()
    assert "other.so" in (CONTENDERS["fa3"].missing(torch.device("cuda")) or "")  # is no library


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A module of this name, and the packages that it lies in."""
    for depth in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:depth])
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    for key, function in functions.items():
        setattr(sys.modules[name], key, function)


def test_flash_attention_4_is_called_with_its_own_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signatures are those of flash-attn-4 4.0.0b36, less what the contender never gives."""
    given: dict[str, Any] = {}

    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, return_lse=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        given.update(locals())
        return q, "lse" if return_lse else None

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, causal=False,
        window_size=(None, None), softcap=0.0, num_splits=1, deterministic=False, return_lse=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        given.update(locals())
        return q, None

    install(
        monkeypatch,
        "flash_attn.cute",
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
    )
    contender = CONTENDERS["fa4"]
    assert contender.missing(torch.device("cuda")) is None
    assert CONTENDERS["fa2"].missing(torch.device("cuda")) is not None  # only a part of the name

    def call(point: Point, with_lse: bool = False) -> tuple[Inputs, Any]:
        inputs = make_inputs(point, CPU)
        build = contender.build_with_lse if with_lse else contender.build
        given.clear()
        return inputs, build(point, inputs)(*inputs.leaves)

    inputs, out = call(replace(POINT, causal=True, window=Bounds(5, None), deterministic=True))
    assert out is inputs.q
    assert (given["causal"], given["window_size"]) == (True, (5, 0))
    assert (given["deterministic"], given["num_splits"], given["return_lse"]) == (True, 1, False)
    call(replace(POINT, window=Bounds(None, 2)))
    assert (given["causal"], given["window_size"]) == (False, (None, 2))
    _, result = call(replace(POINT, softcap=3.0), with_lse=True)
    assert (given["softcap"], result[1]) == (3.0, "lse")
    inputs, _ = call(CASES["packed"])
    assert given["cu_seqlens_q"] is given["cu_seqlens_k"] is inputs.cu_seqlens
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (24, 24)


def test_what_an_installed_version_does_not_take_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(flash_attn_3.VARIABLE, raising=False)
    install(monkeypatch, "flash_attn_interface", flash_attn_func=lambda q, k, v, causal=False: q)
    inputs = make_inputs(POINT, CPU)
    assert CONTENDERS["fa3"].build(POINT, inputs)(*inputs.leaves) is inputs.q
    with pytest.raises(CannotRun, match="FlashAttention-3 as installed takes no softcap"):
        CONTENDERS["fa3"].build(replace(POINT, softcap=3.0), inputs)
