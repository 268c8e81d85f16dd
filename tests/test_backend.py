"""Which backend is chosen: by request, by what serves, with what warning; on a made-up core."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cute_attention import (
    BackendError,
    FallbackWarning,
    _binding,
    _core,
    attention,
    attention_varlen,
    backend,
    explain,
    use_backend,
)
from cute_attention.cli.info import serving
from cute_attention.explain import explain_question
from cute_attention.survey import Features, Question, survey

GPU = torch.device("cuda", 0)
PLAIN = Features()
ENVIRONMENT = "CUTE_ATTENTION_BACKEND"


class Core:
    """Stands for the core: sm80 serves 16-bit head dims to 128, sm90 causal bf16 ones of 128."""

    def __init__(self) -> None:
        self.questions: list[_core.Problem] = []

    def explain(self, problem: _core.Problem, device: int | None) -> list[_core.Candidate]:
        self.questions.append(problem)
        reasons: dict[str, list[str]] = {"sm80": [], "sm90": []}
        for feature in ("bias", "alibi", "sink", "dropout", "nonpositive_scale"):
            if getattr(problem, feature):
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
            _core.Candidate(f"{name}_row", name, not row, 10.0 if not row else None, row)
            for name, row in reasons.items()
        ]


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    made_up = Core()
    monkeypatch.setattr(_core, "available", lambda: True)
    monkeypatch.setattr(_core, "explain", made_up.explain)
    monkeypatch.setattr(_core, "libraries", list)
    monkeypatch.setattr(_binding, "binding_error", lambda: "")
    monkeypatch.setattr(backend, "_choices", {})
    monkeypatch.setattr(backend, "_warned", {})
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    yield made_up


def select(
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    features: Features = PLAIN,
    device: torch.device = GPU,
    requested: str = "auto",
) -> str:
    return backend.select_forward(dtype, head_dim, head_dim, features, device, requested)


def test_the_fastest_that_serves(core: Core) -> None:
    causal = Features(window_right=True)
    assert select(head_dim=128, features=causal) == "sm90"
    assert select(head_dim=128) == "sm80"
    assert select(torch.float16, head_dim=128, features=causal) == "sm80"
    with pytest.warns(FallbackWarning):
        assert select(head_dim=256) == "reference"


def test_the_choice_is_cached(core: Core) -> None:
    first = select()
    asked = len(core.questions)
    assert asked > 0
    assert select() == first
    assert len(core.questions) == asked
    select(head_dim=128)
    assert len(core.questions) > asked


def test_a_cpu_never_asks_the_core(core: Core) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(device=torch.device("cpu")) == "reference"
        assert select(device=torch.device("meta")) == "reference"
    assert not core.questions


def test_falling_back_warns_once_for_each_reason(core: Core) -> None:
    message = r"no kernel serves this call.*sm90: .*no bias.*; sm80: no bias.*backend='reference'"
    with pytest.warns(FallbackWarning, match=message) as caught:
        select(features=Features(bias=True))
        select(features=Features(bias=True))
        select(features=Features(bias=True, varlen=True))
        select(torch.float16, features=Features(bias=True))
    assert len(caught) == 1
    with pytest.warns(FallbackWarning, match="sm80: no sink"):
        select(features=Features(sink=True))


def test_asking_for_the_reference_does_not_warn(core: Core) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(features=Features(bias=True), requested="reference") == "reference"
    assert not core.questions


def test_who_asks_wins(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument over the context, the context over the environment, and back again."""
    question = Question("forward", torch.bfloat16, 64, 64, Features(), GPU)
    assert explain_question(question).chosen == "sm80"
    monkeypatch.setenv(ENVIRONMENT, "reference")
    assert select() == "reference"
    assert f"reference ({ENVIRONMENT})" in str(explain_question(question))
    with use_backend("sm80") as context:
        assert select(requested=backend.requested_backend("auto")) == "sm80"
        with use_backend("sm90"), context:  # one context may be entered again
            assert backend.requested_backend("auto") == "sm80"
            assert backend.requested_backend("reference") == "reference"
        assert backend.requested_backend("auto") == "sm80"
    assert backend.requested_backend("auto") == "auto"
    with pytest.raises(KeyError), use_backend("sm90"):
        raise KeyError
    assert backend.requested_backend("auto") == "auto"


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_forced_backend_raises_what_explain_says(
    by: str, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv(ENVIRONMENT, "sm90")
    with pytest.raises(BackendError) as caught:
        select(features=Features(sink=True), requested="sm90" if by == "argument" else "auto")
    question = Question("forward", torch.bfloat16, 64, 64, Features(sink=True), GPU)
    answer = explain_question(question, "sm90")
    assert answer.chosen is None
    assert "forward:  none: the call raises BackendError" in str(answer)
    for line in str(caught.value).splitlines()[1:]:
        assert line in str(answer)
    assert "no sink; not causal bf16 of 128" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_explain_shows_rows_and_estimates(core: Core) -> None:
    question = Question("forward", torch.bfloat16, 64, 64, Features(), GPU)
    text = str(explain_question(question))
    assert "-> sm80       serves" in text
    assert "-> sm80_row                     serves (about 10.0 us)" in text
    assert "sm90_row                     not causal bf16 of 128" in text


def test_the_problem_tells_everything(core: Core) -> None:
    sizes = {"batch": 3, "seqlen_q": 5, "seqlen_k": 7, "heads": 8, "heads_kv": 2}
    question = Question(
        "forward", torch.float32, 96, 32, Features(*[True] * 9), GPU, deterministic=True
    )
    sized = question._replace(
        sizes=question.sizes._replace(**sizes, window_left=4, window_right=6, softcap=2.5)
    )
    survey(sized)
    assert core.questions[-1] == _core.Problem(
        "forward", "fp32", 3, 5, 7, 8, 2, 96, 32, 4, 6, 2.5, *[True] * 7
    )
    survey(question._replace(features=Features()))
    plain = core.questions[-1]
    assert (plain.window_left, plain.window_right, plain.softcap) == (-1, -1, 0.0)
    assert not (plain.varlen or plain.bias or plain.alibi or plain.sink or plain.dropout)


def test_without_libraries(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "available", lambda: False)
    q = torch.ones(1, 4, 2, 8)
    assert torch.equal(attention(q, q, q), q)
    assert "without its kernel libraries" in str(explain(q, q, q))
    with pytest.raises(BackendError, match="without its kernel libraries"):
        attention(q, q, q, backend="sm80")
    with pytest.warns(FallbackWarning, match="sm80: the package was installed without its kernel"):
        assert select() == "reference"


def test_a_broken_installation_is_told(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binding that does not load, a library of another ABI, a CUDA that the core cannot use."""
    monkeypatch.setattr(_binding, "binding_error", lambda: "the torch binding does not load: X")
    with pytest.warns(FallbackWarning, match="sm80: the torch binding does not load: X"):
        assert select() == "reference"
    refused = _core.LibraryInfo("/lib/old.so", "sm90", "", 0, "it has kernel ABI 0")
    monkeypatch.setattr(_core, "libraries", lambda: [refused])
    monkeypatch.setattr(_core, "explain", lambda problem, device: [])
    with pytest.warns(FallbackWarning, match=r"no sm90 kernel is loaded, /lib/old.so: it has ker"):
        assert select(head_dim=128) == "reference"

    def fails(problem: _core.Problem, device: int | None) -> list[_core.Candidate]:
        raise RuntimeError("the kernel libraries see 0 devices")

    monkeypatch.setattr(_core, "explain", fails)
    with pytest.warns(FallbackWarning, match="sm80: the kernel libraries see 0 devices"):
        assert select(head_dim=192) == "reference"


def test_a_failure_of_the_moment_is_not_kept(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core or a binding that fails once is asked again; forward and backward, then cached."""

    def fails(problem: _core.Problem, device: int | None) -> list[_core.Candidate]:
        raise RuntimeError("out of memory")

    def select_backward() -> str:
        return backend.select_backward(torch.bfloat16, 64, 64, PLAIN, GPU, "auto", False)

    monkeypatch.setattr(backend, "_backward_choices", {})
    for target, name, broken in (
        (_core, "explain", fails),
        (_binding, "binding_error", lambda: "the torch binding does not load: too many files"),
    ):
        with monkeypatch.context() as patch, pytest.warns(FallbackWarning):
            patch.setattr(target, name, broken)
            assert select() == select_backward() == "reference"
        assert select() == select_backward() == "sm80"
        asked = len(core.questions)
        assert select() == select_backward() == "sm80"
        assert len(core.questions) == asked
        backend._choices.clear()
        backend._backward_choices.clear()


def test_the_binding_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not load the first time is loaded the next."""
    loaded: list[Path] = []

    def load(path: Path) -> None:
        loaded.append(path)
        if len(loaded) == 1:
            raise OSError("too many open files")

    monkeypatch.setattr(_binding, "_loaded", False)
    monkeypatch.setattr(_core, "torch_library", lambda: Path("/lib/binding.so"))
    monkeypatch.setattr(_core, "core", lambda: None)
    monkeypatch.setattr(torch.ops, "load_library", load)
    assert _binding.binding_error() == "the torch binding does not load: too many open files"
    assert [_binding.binding_error() for _ in range(3)] == ["", "", ""]
    assert len(loaded) == 2


def test_many_threads_choose_and_warn_once(core: Core) -> None:
    together = threading.Barrier(32)

    def run(_: int) -> str:
        together.wait()
        return select(features=Features(bias=True))

    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(32) as pool:
        warnings.simplefilter("always")
        assert set(pool.map(run, range(32))) == {"reference"}
    assert [warning.category for warning in caught] == [FallbackWarning]


def test_an_empty_environment_variable_asks_for_nothing(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "")
    assert select() == "sm80"
    assert backend.select_backward(torch.bfloat16, 64, 64, PLAIN, GPU, "auto", False) == "sm80"
    question = Question("forward", torch.bfloat16, 64, 64, PLAIN, GPU)
    assert "auto (nothing was asked for)" in str(explain_question(question))


def test_info_shows_forward_and_backward(core: Core) -> None:
    """Each as it is served: here the backward has no kernel for softcap."""
    answer = core.explain

    def without_softcap(problem: _core.Problem, device: int | None) -> list[_core.Candidate]:
        refused = problem.direction == "backward" and problem.softcap > 0
        rows = answer(problem, device)
        return (
            [dataclasses.replace(row, reasons=["no softcap"]) for row in rows] if refused else rows
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "explain", without_softcap)
        forward, backward = "\n".join(serving(GPU)).split("\nBackward on cuda:0\n")
    assert forward.startswith("\nForward on cuda:0\n")
    served = "sm80 fp16 d64, sm80 fp16 d96, sm80 fp16 d128, sm80 bf16 d64, sm80 bf16 d96, "
    for text in (forward, backward):
        assert f"\n  window   {served}sm80 bf16 d128, reference for the rest" in text
        assert f"\n  causal   {served}sm90 bf16 d128, reference for the rest" in text
        assert "\n  bias     reference\n" in text
    assert f"\n  softcap  {served}sm80 bf16 d128, reference for the rest" in forward
    assert "\n  softcap  reference\n" in backward


def test_a_call_reaches_the_kernel_op(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel op is given, dense and packed; its gradient comes from the reference."""
    seen = []

    def forward(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(args)
        q, k, v, cu_seqlens_q, cu_seqlens_k = args[:5]
        options = (*args[5:11], 0.0)
        return torch.ops.cute_attention.reference_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, None, None, *options
        )

    class Packet:
        default = staticmethod(forward)

    monkeypatch.setitem(torch.ops.cute_attention.__dict__, "forward", Packet)
    monkeypatch.setattr("cute_attention._call.select_forward", lambda *args: "sm80")
    q, k = torch.randn(2, 5, 4, 16, requires_grad=True), torch.randn(2, 7, 2, 16)
    out = attention(q, k, k, causal=True, window=(3, None), softcap=2.0)
    assert seen[-1][3:] == (None, None, 5, 7, 0.25, 2.0, 3, 0, "sm80")
    (grad,) = torch.autograd.grad(out.sum(), q)
    plain = attention(q, k, k, causal=True, window=(3, None), softcap=2.0, backend="reference")
    assert torch.equal(grad, torch.autograd.grad(plain.sum(), q)[0])
    # Head dims that are no multiple of 8 are filled up for the kernel, with zeros and nothing else.
    v = torch.randn(2, 7, 2, 13)
    odd = attention(q[..., :11], k[..., :11], v)
    assert [t.shape[-1] for t in seen[-1][:3]] == [16, 16, 16] and seen[-1][7] == 11**-0.5
    assert not any(t[..., dim:].any() for t, dim in zip(seen[-1][:3], (11, 11, 13), strict=True))
    assert odd.is_contiguous()
    expected = attention(q[..., :11], k[..., :11], v, backend="reference")
    torch.testing.assert_close(odd, expected)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    attention_varlen(q[0], q[0], q[0], offsets, offsets, 3, 4, scale=0.5)
    assert seen[-1][3] is offsets and seen[-1][4] is offsets
    assert seen[-1][5:] == (3, 4, 0.5, 0.0, -1, -1, "sm80")
