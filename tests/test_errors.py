"""Wrong calls and what each one says: the type of the error and the message, word for word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_attention import (
    BackendError,
    attention,
    attention_reference,
    attention_varlen,
    explain,
    use_backend,
)
from wrong_calls import DENSE, OPTIONS, VARLEN, VARLEN_VALUES, Wrong, dense, ones, packed

KERNEL_BACKENDS = ("sm90", "sm80")
# Their messages contain the sizes of the dense call.
OPTIONS_OF_BOTH = [row for row in OPTIONS if row.id not in ("bias-shape", "bias-rank")]


def by_id(rows: list[Wrong]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("wrong", rows, ids=[row.id for row in rows])


def assert_says(wrong: Wrong, prefix: str, device: str, call: Callable[[], object]) -> None:
    with pytest.raises(wrong.error) as caught:
        call()
    assert type(caught.value) is wrong.error
    where = str(torch.empty(0, device=device).device)
    expected = f"{prefix}: {wrong.message.replace('DEVICE', where)}"
    assert str(caught.value)[: len(expected)] == expected


def test_there_are_enough_wrong_calls() -> None:
    assert len(DENSE) + len(OPTIONS) + len(VARLEN) + len(VARLEN_VALUES) >= 40


def test_the_calls_are_right_without_changes(device: str) -> None:
    assert attention(**dense(device), backend="reference").shape == (2, 4, 8, 16)
    assert attention_varlen(**packed(device), backend="reference").shape == (4, 8, 16)


@by_id(DENSE + OPTIONS)
def test_attention(wrong: Wrong, device: str) -> None:
    arguments = dense(device, **wrong.changes())
    assert_says(wrong, "attention", device, lambda: attention(**arguments))
    assert_says(wrong, "attention", device, lambda: explain(**arguments))


@by_id(VARLEN + OPTIONS_OF_BOTH)
def test_attention_varlen(wrong: Wrong, device: str) -> None:
    arguments = packed(device, **wrong.changes())
    assert_says(wrong, "attention_varlen", device, lambda: attention_varlen(**arguments))


@by_id(VARLEN_VALUES)
def test_attention_varlen_values(wrong: Wrong) -> None:
    arguments = packed(**wrong.changes())
    assert_says(wrong, "attention_varlen", "cpu", lambda: attention_varlen(**arguments))


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        attention(*dense().values(), True)  # type: ignore[call-overload]


def test_use_backend_knows_its_names() -> None:
    with pytest.raises(ValueError, match="use_backend: backend is 'cudnn', expected one of"):
        use_backend("cudnn")


def test_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTENTION_BACKEND", "sm70")
    with pytest.raises(ValueError, match="CUTE_ATTENTION_BACKEND is 'sm70', expected one of"):
        attention(**dense())


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_a_forced_backend_says_why_it_cannot_serve(backend: str, device: str) -> None:
    """No kernel serves float32, and the error contains the lines of `explain`."""
    arguments = dense(device)
    with pytest.raises(BackendError) as caught:
        attention(**arguments, backend=backend)
    message = str(caught.value)
    assert message.startswith(f"attention: backend '{backend}' cannot serve this call\n")
    answer = explain(**arguments, backend=backend)
    assert answer.chosen is None
    (report,) = (report for report in answer.forward if report.backend == backend)
    assert report.reasons
    for line in report.reasons:
        assert line in message
        assert line in str(answer)


@pytest.mark.parametrize(
    ("argument", "size", "shapes"),
    [
        ("q", "batch", ((2**32 + 1, 1, 1, 8),) * 3),
        ("q", "seqlen_q", ((1, 2**31, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8))),
        ("k", "seqlen_k", ((1, 4, 1, 8), (1, 2**40, 1, 8), (1, 2**40, 1, 8))),
        ("q", "heads", ((1, 4, 2**33, 8), (1, 4, 1, 8), (1, 4, 1, 8))),
        ("k", "heads_kv", ((1, 4, 0, 8), (1, 4, 2**32, 8), (1, 4, 2**32, 8))),
        ("q", "head_dim", ((1, 4, 1, 2**35), (1, 4, 1, 2**35), (1, 4, 1, 8))),
        ("v", "head_dim_v", ((1, 4, 1, 8), (1, 4, 1, 8), (1, 4, 1, 2**31))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_explain_wraps_no_size(argument: str, size: str, shapes: tuple) -> None:
    """The error names a size that does not fit an int32. A batch of 2^32 + 1 once became 1."""
    tensors = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes]
    label = {"q": 0, "k": 1, "v": 2}[argument]
    axis = {"batch": 0, "seqlen_q": 1, "seqlen_k": 1, "heads": 2, "heads_kv": 2}.get(size, 3)
    message = f"explain: {size} of {argument} is {shapes[label][axis]}, expected 0 to 2147483647"
    with pytest.raises(ValueError, match=f"^{message}$"):
        explain(*tensors)


def test_explain_takes_the_largest_sizes_and_windows() -> None:
    """The largest int32 is legal, and so is a wider window, since it bounds nothing."""
    q = torch.empty(1, 2**31 - 1, 1, 8, device="meta", dtype=torch.bfloat16)
    answer = explain(q, q, q, window=(2**32 + 5, None))
    assert answer.chosen == "reference"
    assert f"seqlen {2**31 - 1} x {2**31 - 1}" in str(answer)


def test_alibi_slopes_may_be_parameters_where_nothing_is_recorded(device: str) -> None:
    slopes = torch.rand(8, device=device)
    with torch.no_grad():
        actual = attention(**dense(device), alibi_slopes=torch.nn.Parameter(slopes))
    assert torch.equal(actual, attention(**dense(device), alibi_slopes=slopes))


def test_the_formula_refuses_alibi_slopes_with_a_gradient_too() -> None:
    slopes = torch.rand(8, requires_grad=True)
    with pytest.raises(ValueError, match="attention_reference: alibi_slopes requires a gradient"):
        attention_reference(**dense(), alibi_slopes=slopes)


def test_a_failed_check_leaves_no_trace() -> None:
    """The generator draws no seed before all checks have passed."""
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="sink has shape"):
        attention(**dense(), dropout_p=0.5, sink=ones(3))
    assert torch.equal(torch.get_rng_state(), state)
