"""The public functions on every machine: documentation, results, dropout seeds, import, fork."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys
import typing
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_attention
from cute_attention import (
    attention,
    attention_reference,
    attention_varlen,
    attention_varlen_reference,
    explain,
    kernels,
    rows,
    use_backend,
)
from cute_attention.options import DEFAULTS, AllOptions, Options
from tolerances import assert_close

PUBLIC = [
    getattr(module, name)
    for module in (cute_attention, cute_attention.inference, rows)
    for name in module.__all__
]
DOCUMENTED = [item for item in PUBLIC if "Example" in (item.__doc__ or "")]
OPTIONS = (
    "causal", "window", "scale", "softcap", "alibi_slopes", "bias", "sink", "dropout_p",
    "dropout_seed", "deterministic", "return_lse", "backend", "kernel",
)  # fmt: skip


def documented_arguments(item: Any) -> list[str]:
    """The names in the "Args:" section of a docstring."""
    section = re.search(r"Args:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(item) or "", re.S)
    return re.findall(r"^    (\w+):", section.group(1), re.M) if section else []


@pytest.mark.parametrize("item", PUBLIC, ids=lambda item: item.__name__)
def test_documentation(item: Any) -> None:
    """Documented argument names are those of the signature; examples run."""
    assert item.__doc__
    if inspect.isfunction(item):
        assert documented_arguments(item) == list(inspect.signature(item).parameters)
        assert "Example:" in item.__doc__
        for parameter in inspect.signature(item).parameters.values():
            assert parameter.annotation is not parameter.empty
        code = inspect.unwrap(item).__code__
        has_more = bool(code.co_flags & inspect.CO_VARARGS)  # *kernels
        written = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + has_more]
        written += ("options",) if "options" in item.__annotations__ else ()
        assert set(typing.get_type_hints(item)) == {*written, "return"}
    globs: dict[str, Any] = {}
    examples = doctest.DocTestFinder(recurse=False).find(item, item.__name__, globs=globs)
    for example in examples:
        runner = doctest.DocTestRunner()
        runner.run(example)
        assert runner.failures == 0
    assert item not in DOCUMENTED or any(example.examples for example in examples)


@pytest.mark.parametrize("function", [attention, attention_varlen, explain])
def test_signature(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    keywords = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    assert keywords == OPTIONS
    tensors = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    packed = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert tensors == ["q", "k", "v", *([] if function is attention else packed)]


def test_options_are_written_once() -> None:
    """Each option has a type, a default and a meaning; overloads tell return_lse alone apart."""
    assert tuple(DEFAULTS) == OPTIONS
    assert documented_arguments(Options) == list(OPTIONS)
    assert {*typing.get_type_hints(AllOptions)} == {*OPTIONS}
    for function in (attention, attention_varlen):
        source = inspect.getsource(sys.modules[function.__module__])
        bodies = re.findall(rf"def {function.__name__}\((.*?)\n\)", source, re.S)
        names = [re.findall(r"^    (?:\*\*)?(\w+):", body, re.M) for body in bodies]
        tensors = [name for name in inspect.signature(function).parameters if name not in OPTIONS]
        assert names == [[*tensors, "return_lse", "options"]] * 3 + [[*tensors, "options"]]


def qkv(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, 9, 16), (2, 2, 13, 16), (2, 2, 13, 24))
    return [torch.randn(shape, device=device).transpose(1, 2).to(dtype) for shape in shapes]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "window list": {"window": [None, 2]},
    "causal window": {"causal": True, "window": (3, 5)},
    "scale": {"scale": 1},
    "softcap": {"softcap": 2.0},
    "softcap off": {"softcap": 0},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 2**63 + 5},
    "dropout all": {"dropout_p": 1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_dense_results_are_those_of_the_formula(name: str, dtype: torch.dtype, device: str) -> None:
    tensors = qkv(device, dtype)
    results = attention(*tensors, return_lse=True, backend="reference", **CALLS[name])
    expected = attention_reference(*tensors, return_lse=True, **CALLS[name])
    for label, actual, wanted in zip(("out", "lse"), results, expected, strict=True):
        assert actual.is_contiguous()
        assert_close(actual, wanted, "rounding", name=label)
    alone = attention(*tensors, backend="reference", **CALLS[name] | {"dropout_seed": 1})
    assert alone.shape == results[0].shape


@pytest.mark.parametrize("name", CALLS)
def test_varlen_results_are_those_of_the_formula(name: str, device: str) -> None:
    q, k, v = (t[0] for t in qkv(device))
    cu_seqlens_q = torch.tensor([0, 5, 5, 9], dtype=torch.int32, device=device)
    cu_seqlens_k = torch.tensor([0, 9, 8, 9, 10, 9, 13], dtype=torch.int32, device=device)[::2]
    assert not cu_seqlens_k.is_contiguous()
    options = CALLS[name] | {"return_lse": True}
    results = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, 5, 8, backend="reference", **options
    )
    expected = attention_varlen_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    for label, actual, wanted in zip(("out", "lse"), results, expected, strict=True):
        assert_close(actual, wanted, "rounding", name=label)


@pytest.mark.parametrize("shape", [(4, 1, 13), (9, 13), (13,), (), (2, 1, 1, 1)], ids=str)
def test_bias_broadcasts(shape: tuple[int, ...], device: str) -> None:
    tensors = qkv(device)
    bias = torch.randn(shape, device=device)
    actual = attention(*tensors, bias=bias, backend="reference")
    assert_close(actual, attention_reference(*tensors, bias=bias), "rounding")


def test_half_precision_takes_a_float32_bias(device: str) -> None:
    tensors = qkv(device, torch.bfloat16)
    bias = torch.randn(9, 13, device=device)
    out = attention(*tensors, bias=bias, backend="reference")
    assert out.dtype == torch.bfloat16
    assert_close(out, attention_reference(*tensors, bias=bias), "rounding")


def test_causal_rows_without_keys(device: str) -> None:
    """More queries than keys, aligned to the bottom right: the first rows see nothing."""
    q, k, v = (t.to(device) for t in (torch.randn(1, 5, 2, 8), *torch.randn(2, 1, 3, 2, 8)))
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend="reference")
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    assert torch.isneginf(lse[..., :2]).all()
    assert lse[..., 2:].isfinite().all()
    sink = torch.tensor([0.5, -1.0], device=device)
    _, lse = attention(q, k, v, causal=True, sink=sink, return_lse=True, backend="reference")
    assert torch.equal(lse[0, :, :2], sink[:, None].expand(2, 2))


def test_dropout_seeds(device: str) -> None:
    """torch.manual_seed governs a drawn seed; an int and a tensor of the same value agree."""
    tensors = qkv(device)

    def run(seed: int | Tensor | None) -> Tensor:
        return attention(*tensors, dropout_p=0.5, dropout_seed=seed, backend="reference")

    torch.manual_seed(3)
    first = [run(None), run(None)]
    torch.manual_seed(3)
    again = [run(None), run(None)]
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    state = torch.get_rng_state()
    assert torch.equal(run(7), run(torch.tensor(7, device=device)))
    assert torch.equal(run(-1), run(torch.tensor([-1], device=device)))
    assert torch.equal(run(-1), run(2**64 - 1))
    assert torch.equal(torch.get_rng_state(), state)


def test_empty_tensors(device: str) -> None:
    for batch, seqlen_q, seqlen_k in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        q = torch.randn(batch, seqlen_q, 2, 8, device=device, requires_grad=True)
        k = torch.randn(batch, seqlen_k, 2, 8, device=device, requires_grad=True)
        out, lse = attention(q, k, k, return_lse=True, backend="reference")
        assert out.shape == q.shape
        assert torch.isneginf(lse).sum() == (lse.numel() if seqlen_k == 0 else 0)
        out.sum().backward()
        assert torch.count_nonzero(q.grad) == 0


def test_kernels_are_rows() -> None:
    rows = kernels()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        direction = {"forward": "fwd", "backward": "bwd"}[row.direction]
        assert row.name.startswith(f"{row.arch}_{direction}_{row.dtype}_d{row.head_dim}")


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*|unknown", cute_attention.__version__)
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        cute_attention.missing  # noqa: B018


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


IMPORT = """
import os, sys, torch
import cute_attention
assert not torch.cuda.is_initialized()
libraries = [line for line in open("/proc/self/maps") if "libcute_attention" in line]
assert not libraries, libraries
child = os.fork()
if child == 0:
    q = torch.randn(1, 8, 2, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    out = cute_attention.attention(q, q, q, causal=True)
    os._exit(0 if out.isfinite().all() else 1)
assert os.waitpid(child, 0)[1] == 0
out = cute_attention.attention(*torch.randn(3, 1, 8, 2, 16))
assert out.isfinite().all() and not torch.cuda.is_initialized()
libraries = [line for line in open("/proc/self/maps") if "libcute_attention" in line]
assert not libraries, libraries
print("done")
"""


def test_import_neither_loads_libraries_nor_initialises_cuda() -> None:
    """So that a process may fork after the import and use CUDA in the child."""
    assert run_python(IMPORT) == "done\n"


def test_info_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cute_attention", "info"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    for heading in ("cute_attention ", "torch ", "\nLibraries\n", "\nDevices\n  cpu: "):
        assert heading in result.stdout
    for direction in ("Forward", "Backward"):
        assert f"\n{direction} on cpu\n  reference serves every call" in result.stdout
    for row in kernels():
        assert row.name in result.stdout


def test_explain_says_what_runs() -> None:
    q, k, v = qkv("cpu")
    answer = explain(q, k, v, window=(4, 0), softcap=2.0, dropout_p=0.1)
    assert answer.chosen == answer.chosen_backward == "reference"
    assert [report.backend for report in answer.forward] == ["sm90", "sm80", "reference"]
    text = str(answer)
    assert text.startswith(
        "call:     fp32 on cpu, batch 2, seqlen 9 x 13, heads 4 of 2, head dim 16 and 24, "
        "window (4, 0), softcap, dropout\n"
        "asked:    auto (nothing was asked for)\n"
        "forward:  reference\n"
    )
    assert "-> reference  serves" in text
    with use_backend("reference"):
        assert "asked:    reference (use_backend)" in str(explain(q, k, v))
    assert "asked:    reference (argument)" in str(explain(q, k, v, backend="reference"))
    offsets = torch.tensor([0, 5, 9], dtype=torch.int32)
    packed = explain(q[0], q[0], q[0], offsets, offsets, 5, 5, causal=True)
    assert "batch 2, seqlen 5 x 5" in str(packed)
    assert "causal, varlen" in str(packed)
