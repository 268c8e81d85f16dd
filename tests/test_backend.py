"""Which backend is chosen: by request, by what serves, with what warning; on a made-up core."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attention import (
    BackendError,
    FallbackWarning,
    attention,
    attention_reference,
    attention_varlen,
    explain,
    use_backend,
)
from cute_attention.arguments import FEATURES
from cute_attention.cli.info import serving
from cute_attention.dispatch import request
from cute_attention.dispatch import select as selection
from cute_attention.dispatch.backends import BACKENDS, survey
from cute_attention.dispatch.explain import explain_problem
from cute_attention.native import binding, core
from cute_attention.problem import Problem

GPU = torch.device("cuda", 0)
PLAIN = Problem(device=GPU)
BITS = {word: bit for bit, word in FEATURES.items()}
BIAS, SINK = PLAIN._replace(features=BITS["bias"]), PLAIN._replace(features=BITS["sink"])
ENVIRONMENT = "CUTE_ATTENTION_BACKEND"


class Core:
    """Stands for the core: sm80 serves 16-bit head dims to 128, sm90 causal bf16 ones of 128."""

    def __init__(self) -> None:
        self.questions: list[Problem] = []

    def explain(self, problem: Problem, device: int | None) -> list[core.Candidate]:
        self.questions.append(problem)
        reasons: dict[str, list[str]] = {"sm80": [], "sm90": []}
        for bit, feature in FEATURES.items():
            if problem.features & bit:
                for row in reasons.values():
                    row.append(f"no {feature}")
        if problem.dtype not in ("fp16", "bf16"):
            reasons["sm80"].append("dtype is fp32")
        if problem.head_dim > 128:
            reasons["sm80"].append("head_dim is above 128")
        causal = (problem.window_left, problem.window_right) == (-1, 0)
        if (problem.dtype, problem.head_dim, causal) != ("bf16", 128, True):
            reasons["sm90"].append("not causal bf16 of 128")
        return [
            core.Candidate(f"{name}_row", name, not row, 10.0 if not row else None, row)
            for name, row in reasons.items()
        ]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    answers = Core()
    monkeypatch.setattr(core, "available", lambda: True)
    monkeypatch.setattr(core, "explain", answers.explain)
    monkeypatch.setattr(core, "libraries", list)
    monkeypatch.setattr(binding, "binding_error", lambda: "")
    monkeypatch.setattr(selection, "_choices", {})
    monkeypatch.setattr(selection, "_warned", {})
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    yield answers


def select(
    dtype: str = "bf16",
    head_dim: int = 64,
    problem: Problem = PLAIN,
    requested: str = "auto",
) -> str:
    kind = problem._replace(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
    return selection.select(request.requested_backend(requested), *kind)


def select_backward() -> str:
    return select(problem=PLAIN._replace(direction="backward"))


def test_the_fastest_that_serves(made_up: Core) -> None:
    causal = PLAIN._replace(window_right=0)
    assert select(head_dim=128, problem=causal) == "sm90"
    assert select(head_dim=128) == "sm80"
    assert select("fp16", head_dim=128, problem=causal) == "sm80"
    with pytest.warns(FallbackWarning):
        assert select(head_dim=256) == "reference"


def test_the_choice_is_cached(made_up: Core) -> None:
    first = select()
    asked = len(made_up.questions)
    assert asked > 0
    assert select() == first
    assert len(made_up.questions) == asked
    select(head_dim=128)
    assert len(made_up.questions) > asked


def test_a_cpu_never_asks_thecore(made_up: Core) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(problem=PLAIN._replace(device=torch.device("cpu"))) == "reference"
        assert select(problem=PLAIN._replace(device=torch.device("meta"))) == "reference"
    assert not made_up.questions


def test_falling_back_warns_once_for_each_reason(made_up: Core) -> None:
    message = r"no kernel serves this call.*sm90: .*no bias.*; sm80: no bias.*backend='reference'"
    with pytest.warns(FallbackWarning, match=message) as caught:
        select(problem=BIAS)
        select(problem=BIAS)
        select(head_dim=96, problem=BIAS)
        select("fp16", problem=BIAS)
    assert len(caught) == 1
    with pytest.warns(FallbackWarning, match="sm80: no sink"):
        select(problem=SINK)


def test_asking_for_the_reference_does_not_warn(made_up: Core) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(problem=BIAS, requested="reference") == "reference"
    assert not made_up.questions


def test_who_asks_wins(made_up: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument over the context, the context over the environment, and back again."""
    assert explain_problem(PLAIN).chosen == "sm80"
    monkeypatch.setenv(ENVIRONMENT, "reference")
    assert select() == "reference"
    assert f"reference ({ENVIRONMENT})" in str(explain_problem(PLAIN))
    with use_backend("sm80") as context:
        assert select() == "sm80"
        with use_backend("sm90"), context:  # one context may be entered again
            assert request.requested_backend("auto") == "sm80"
            assert request.requested_backend("reference") == "reference"
        assert request.requested_backend("auto") == "sm80"
    assert request.requested_backend("auto") == "reference"
    with pytest.raises(KeyError), use_backend("sm90"):
        raise KeyError
    assert request.requested_backend("auto") == "reference"
    monkeypatch.delenv(ENVIRONMENT)
    assert request.requested_backend("auto") == "auto"


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_forced_backend_raises_what_explain_says(
    by: str, made_up: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv(ENVIRONMENT, "sm90")
    with pytest.raises(BackendError) as caught:
        select(problem=SINK, requested="sm90" if by == "argument" else "auto")
    answer = explain_problem(SINK, "sm90")
    assert answer.chosen is None
    assert "forward:  none: the call raises BackendError" in str(answer)
    for line in str(caught.value).splitlines()[1:]:
        assert line in str(answer)
    assert "no sink; not causal bf16 of 128" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_explain_shows_rows_and_estimates(made_up: Core) -> None:
    text = str(explain_problem(PLAIN))
    assert "-> sm80       serves" in text
    assert "-> sm80_row                     serves (about 10.0 us)" in text
    assert "sm90_row                     not causal bf16 of 128" in text


def test_the_problem_tells_everything(made_up: Core) -> None:
    problem = Problem("backward", "fp32", 3, 5, 7, 8, 2, 91, 27, 4, 6, 2.5, sum(FEATURES), "", GPU)
    survey(problem)
    assert made_up.questions[-1] == problem._replace(head_dim=96, head_dim_v=32)


def test_without_libraries(made_up: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "available", lambda: False)
    q = torch.ones(1, 4, 2, 8)
    assert torch.equal(attention(q, q, q), q)
    assert "without its kernel libraries" in str(explain(q, q, q))
    with pytest.raises(BackendError, match="without its kernel libraries"):
        attention(q, q, q, backend="sm80")
    with pytest.warns(FallbackWarning, match="sm80: the package was installed without its kernel"):
        assert select() == "reference"


def test_a_broken_installation_is_told(made_up: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binding that does not load, a library of another ABI, a CUDA that the core cannot use."""
    monkeypatch.setattr(binding, "binding_error", lambda: "the torch binding does not load: X")
    with pytest.warns(FallbackWarning, match="sm80: the torch binding does not load: X"):
        assert select() == "reference"
    refused = core.LibraryInfo("/lib/old.so", "sm90", "", 0, "it has kernel ABI 0")
    monkeypatch.setattr(core, "libraries", lambda: [refused])
    monkeypatch.setattr(core, "explain", lambda problem, device: [])
    with pytest.warns(FallbackWarning, match=r"no sm90 kernel is loaded, /lib/old.so: it has ker"):
        assert select(head_dim=128) == "reference"

    def fails(problem: Problem, device: int | None) -> list[core.Candidate]:
        raise RuntimeError("the kernel libraries see 0 devices")

    monkeypatch.setattr(core, "explain", fails)
    with pytest.warns(FallbackWarning, match="sm80: the kernel libraries see 0 devices"):
        assert select(head_dim=192) == "reference"


def test_a_failure_of_the_moment_is_not_kept(
    made_up: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core or a binding that fails once is asked again; forward and backward, then cached."""

    def fails(problem: Problem, device: int | None) -> list[core.Candidate]:
        raise RuntimeError("out of memory")

    for target, name, broken in (
        (core, "explain", fails),
        (binding, "binding_error", lambda: "the torch binding does not load: too many files"),
    ):
        with monkeypatch.context() as patch, pytest.warns(FallbackWarning):
            patch.setattr(target, name, broken)
            assert select() == select_backward() == "reference"
        assert select() == select_backward() == "sm80"
        asked = len(made_up.questions)
        assert select() == select_backward() == "sm80"
        assert len(made_up.questions) == asked
        selection._choices.clear()


def test_the_binding_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not load the first time is loaded the next."""
    loaded: list[Path] = []

    def load(path: Path) -> None:
        loaded.append(path)
        if len(loaded) == 1:
            raise OSError("too many open files")

    monkeypatch.setattr(binding, "_loaded", False)
    monkeypatch.setattr(core, "torch_library", lambda: Path("/lib/binding.so"))
    monkeypatch.setattr(core, "core", lambda: None)
    monkeypatch.setattr(torch.ops, "load_library", load)
    assert binding.binding_error() == "the torch binding does not load: too many open files"
    assert [binding.binding_error() for _ in range(3)] == ["", "", ""]
    assert len(loaded) == 2


def test_many_threads_choose_and_warn_once(made_up: Core) -> None:
    together = threading.Barrier(32)

    def run(_: int) -> str:
        together.wait()
        return select(problem=BIAS)

    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(32) as pool:
        warnings.simplefilter("always")
        assert set(pool.map(run, range(32))) == {"reference"}
    assert [warning.category for warning in caught] == [FallbackWarning]


def test_an_empty_environment_variable_asks_for_nothing(
    made_up: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "")
    assert select() == "sm80"
    assert select_backward() == "sm80"
    assert "auto (nothing was asked for)" in str(explain_problem(PLAIN))


def test_info_shows_forward_and_backward(made_up: Core) -> None:
    """Each as it is served: here the backward has no kernel for softcap."""
    answer = made_up.explain

    def without_softcap(problem: Problem, device: int | None) -> list[core.Candidate]:
        refused = problem.direction == "backward" and problem.softcap > 0
        rows = answer(problem, device)
        return (
            [dataclasses.replace(row, reasons=["no softcap"]) for row in rows] if refused else rows
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "explain", without_softcap)
        forward, backward = "\n".join(serving(GPU)).split("\nBackward on cuda:0\n")
    assert forward.startswith("\nForward on cuda:0\n")
    served = "sm80 fp16 d64, sm80 fp16 d96, sm80 fp16 d128, sm80 bf16 d64, sm80 bf16 d96, "
    for text in (forward, backward):
        assert f"\n  {'window':<17} {served}sm80 bf16 d128, reference for the rest" in text
        assert f"\n  {'causal':<17} {served}sm90 bf16 d128, reference for the rest" in text
        assert f"\n  {'bias':<17} reference\n" in text
    assert f"\n  {'softcap':<17} {served}sm80 bf16 d128, reference for the rest" in forward
    assert f"\n  {'softcap':<17} reference\n" in backward


def test_a_call_reaches_the_kernel_op(made_up: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel op is given, dense and packed; its gradient comes from the reference."""
    seen = []

    def output(*args: Any) -> torch.Tensor:
        seen.append(args)
        return torch.ops.cute_attention.reference_forward.output(*args)

    def forward(*args: Any) -> Any:
        seen.append(args)
        return torch.ops.cute_attention.reference_forward(*args)

    ops = BACKENDS["sm80"].ops._replace(forward=forward, output=output)
    monkeypatch.setitem(BACKENDS, "sm80", dataclasses.replace(BACKENDS["sm80"], ops=ops))
    choices = {"forward": "sm80", "backward": "reference"}
    monkeypatch.setattr(
        "cute_attention.dispatch.plans.select", lambda _, direction, *rest: choices[direction]
    )
    q, k = torch.randn(2, 5, 4, 16, requires_grad=True), torch.randn(2, 7, 2, 16)
    out = attention(q, k, k, causal=True, window=(3, None), softcap=2.0)
    assert seen[-1][3:8] == ("sm80", 0.25, 3, 0, 2.0)
    (grad,) = torch.autograd.grad(out.sum(), q)
    expected = attention_reference(q, k, k, causal=True, window=(3, None), softcap=2.0)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), q)[0])
    # Head dims that are no multiple of 8 are filled up for the kernel, with zeros and nothing else.
    v = torch.randn(2, 7, 2, 13)
    odd = attention(q.detach()[..., :11], k[..., :11], v)
    assert [t.shape[-1] for t in seen[-1][:3]] == [16, 16, 16] and seen[-1][4] == 11**-0.5
    assert not any(t[..., dim:].any() for t, dim in zip(seen[-1][:3], (11, 11, 13), strict=True))
    assert odd.is_contiguous()
    torch.testing.assert_close(odd, attention_reference(q[..., :11], k[..., :11], v))
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    attention_varlen(q[0], q[0], q[0], offsets, offsets, 3, 4, scale=0.5)
    assert seen[-1][3:8] == ("sm80", 0.5, -1, -1, 0.0)
    assert seen[-1][8] is offsets and seen[-1][9] is offsets
    assert seen[-1][10:12] == (3, 4)
