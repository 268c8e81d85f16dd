"""Calls with a cache that have been made before: no check, and the same results; whatever differs
is checked again. On the CPU plain PyTorch stands in for the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_calls import Call, Form
from cute_attention import use_backend
from cute_attention.cache_arguments import CacheArguments
from cute_attention.inference import (
    api,
    attention_with_cache,
    choice,
    lowered,
    plans,
)
from cute_attention.ops.cache import BRIEF_OPTIONAL, OPTIONAL
from latent_calls import latent_call, latent_form
from test_cache_in_place import standing_in
from tolerances import assert_close, assert_same_bits

CAUSAL = {"causal": True}


class Seen:
    """What the op was called with, and how often arguments were checked."""

    def __init__(self, ran: list[dict[str, Any]]) -> None:
        self.ran = ran
        self.checked = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    library = torch.library.Library("cute_attention", "IMPL")

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return lowered.lowered_forward(CacheArguments(*args))

    library.impl("cached_forward", forward, "CPU")
    library.impl("cached_forward.output", lambda *args: forward(*args)[0], "CPU")
    monkeypatch.setattr(plans, "plans", {})
    monkeypatch.setattr(
        choice, "select", lambda asked, *_: "reference" if asked == "reference" else "sm80"
    )
    monkeypatch.delenv("CUTE_ATTENTION_BACKEND", raising=False)
    with standing_in() as ran:
        seen = Seen(ran)
        long_way = api.checked_cache

        def counted(*args: Any) -> CacheArguments:
            seen.checked += 1
            return long_way(*args)

        monkeypatch.setattr(api, "checked_cache", counted)
        yield seen
    library._destroy()


FORMS = {
    "read": Form(options=CAUSAL, batch_idx=True),
    "append": Form(new=1, queries=1, options=CAUSAL, leftpad=True, rotary="halves"),
    "pages": Form(page_size=16, new=2, rotary="interleaved partial", batch_idx=True),
    "packed": Form(packed=True, new=1, options={"window": (9, 0)}),
    "in tokens": Form(packed=True, new=1, page_size=16, rotary="halves", options=CAUSAL),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_second_call_is_not_checked(form: str, seen: Seen) -> None:
    for index, lengths in enumerate(((0, 1, 15, 16, 31, 48, 64, 65), (7, 0, 2, 33, 64, 65, 1, 9))):
        call = Call(Form(**{**vars(FORMS[form]), "lengths": lengths}))
        out, lse = call.flat(*attention_with_cache(**call.given, return_lse=True))
        assert seen.checked == 1
        assert len(seen.ran) == index + 1
        caches = [call.given["k_cache"], call.given["v_cache"]]
        exact, exact_lse = call.expected(caches)
        assert_close(out.double(), exact, "rounding", torch.float32)
        assert_close(lse.double(), exact_lse, "rounding", torch.float32, "lse")


def test_lengths_may_grow(seen: Seen) -> None:
    """The longest ones, the numbers of sequences and tokens, and the room of the cache."""
    call = Call(FORMS["read"])
    for longest in (70, 80, 10**6, 0):
        attention_with_cache(**call.given, max_seqlen_k=longest)
        assert seen.ran[-1]["max_seqlen_k"] == longest
    assert seen.checked == 1
    for wrong in (-1, 2**31, 2**63, 2**70, True, 2.0):
        with pytest.raises((TypeError, ValueError), match="max_seqlen_k is"):
            attention_with_cache(**call.given, max_seqlen_k=wrong)
    packed, checked = Call(FORMS["packed"]), seen.checked
    for longest in (9, 20, 30):
        attention_with_cache(**packed.given | {"max_seqlen_q": longest})
    assert seen.checked == checked + 1
    with pytest.raises(ValueError, match="max_seqlen_q is -1, expected an int >= 0"):
        attention_with_cache(**packed.given | {"max_seqlen_q": -1})
    attention_with_cache(**Call(Form(queries=2, options=CAUSAL, lengths=(3, 4))).given)
    checked = seen.checked
    for queries, lengths in ((2, (5,)), (1, (7, 8, 9)), (5, (40,) * 5)):
        form = Form(queries=queries, options=CAUSAL, lengths=lengths)
        attention_with_cache(**Call(form).given)
    assert seen.checked == checked


@pytest.mark.parametrize("lse", [False, True])
def test_common_calls_take_the_brief_op(lse: bool, seen: Seen) -> None:
    """Which has the first arguments of the other one."""
    assert OPTIONAL[: len(BRIEF_OPTIONAL)] == BRIEF_OPTIONAL
    for form, is_brief in (
        ("pages", False),
        ("read", False),
        ("packed", True),
        ("in tokens", True),
    ):
        plans.plans.clear()
        attention_with_cache(**Call(FORMS[form]).given, return_lse=lse)
        (plan,) = plans.plans.values()
        brief = torch.ops.cute_attention.brief_attend_cache
        op = brief.default if lse else brief.output
        assert (plan.op is op.op) == is_brief
        assert len(plan.names) == 0 or plan.names[-1] in Call(FORMS[form]).given


def test_lengths_on_the_host(seen: Seen) -> None:
    """An int for all sequences, another one at each call."""
    form = Form(queries=1, new=1, options=CAUSAL, lengths=(40,) * 3)
    packed = Form(packed=True, new=1, options=CAUSAL, lengths=(40,) * 3)
    for given in (Call(form).given, Call(packed).given):
        checked = seen.checked
        for length in (40, 7, 0):
            lengths = torch.full((3,), length, dtype=torch.int32)
            wanted = outcome(given | {"cache_seqlens": lengths})
            for one, other in zip(
                outcome(given | {"cache_seqlens": length}), wanted, strict=True
            ):  # fmt: skip
                assert_same_bits(one, other, f"{length}")
        assert seen.checked == checked + 2
    for wrong in (-1, 2**31, 2**70, True, 2.0):
        with pytest.raises((TypeError, ValueError), match="cache_seqlens is"):
            attention_with_cache(**given | {"cache_seqlens": wrong})


def test_tensors_that_were_one(seen: Seen) -> None:
    """k and v of the first call are the same tensor, those of the second are not."""
    torch.manual_seed(0)
    q, new, other = torch.randn(3, 2, 1, 2, 16).unbind()
    caches = torch.zeros(2, 2, 8, 2, 16)
    lengths = torch.zeros(2, dtype=torch.int32)
    attention_with_cache(q, *caches, lengths, k=new, v=new)
    attention_with_cache(q, *caches, lengths, k=new, v=other)
    assert seen.checked == 1
    assert_same_bits(caches[0][:, 0], new[:, 0], "k_cache")
    assert_same_bits(caches[1][:, 0], other[:, 0], "v_cache")


def outcome(given: dict[str, Any]) -> Any:
    """Results and caches, or what the error says. The caches are left as they were."""
    caches = [given[name] for name in ("k_cache", "v_cache") if isinstance(given[name], Tensor)]
    before = [cache.detach().clone() for cache in caches]
    try:
        results = attention_with_cache(**given, return_lse=True)
        return (*results, *(cache.clone() for cache in caches))
    except Exception as error:
        return type(error), str(error)
    finally:
        for cache, saved in zip(caches, before, strict=True):
            cache.detach().copy_(saved)


OPTIONS: dict[str, Any] = {
    "an option that is no int": {"num_splits": 2.0},
    "an option": {"causal": 1},
    "a window of bools": {"window": (True, 0)},
    "a window of floats": {"window": (1.0, 0)},
    "a window that is a list": {"window": [1, 0]},
    "a softcap that is a bool": {"softcap": True},
    "no such option": {"caussal": True},
    "no such backend": {"backend": "sm70"},
}


@pytest.mark.parametrize("change", OPTIONS)
def test_options_that_are_wrong(change: str, seen: Seen) -> None:
    """Right ones that are equal to them have been passed before."""
    given = Call(FORMS["read"]).given
    changed = given | OPTIONS[change]
    plans.plans.clear()
    wanted = outcome(changed)
    for right in ({}, {"num_splits": 2}, {"window": (1, 0), "causal": False}, {"softcap": 1.0}):
        outcome(given | right)
    assert len(plans.plans) >= 4
    found = outcome(changed)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(one, Tensor):
            assert_same_bits(one, other, change)
        else:
            assert one == other


def test_gradients_are_refused_where_they_are_recorded(seen: Seen) -> None:
    given = Call(FORMS["read"]).given
    attention_with_cache(**given)
    wants = given | {"q": given["q"].clone().requires_grad_()}
    with pytest.raises(ValueError, match="q requires a gradient, expected none"):
        attention_with_cache(**wants)
    with torch.no_grad():
        assert_same_bits(attention_with_cache(**wants), attention_with_cache(**given), "out")
    assert seen.checked == 2
    sink = torch.nn.Parameter(torch.zeros(4))
    for _ in range(2):
        assert not attention_with_cache(**given, sink=sink).requires_grad


def test_autocast_casts_before_the_plan(seen: Seen) -> None:
    """q, k and v; the cache has the dtype of autocast."""
    call = Call(Form(new=1, queries=1, options=CAUSAL, dtype=torch.bfloat16))
    wide = {name: call.given[name].float() for name in ("q", "k", "v")}
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            outcomes = [outcome(given) for given in (call.given, call.given | wide)]
            for one, other in zip(*outcomes, strict=True):
                assert_same_bits(one, other, "results")
    assert seen.checked == 1 and len(seen.ran) == 4
    assert attention_with_cache(**call.given).dtype == torch.bfloat16
    with pytest.raises(
        TypeError, match=r"k_cache has dtype torch\.bfloat16, expected torch\.float32"
    ):
        attention_with_cache(**call.given | wide)


def test_values_that_are_columns_of_keys(seen: Seen) -> None:
    """Latent attention: the kernel gets views, and only where memory is shared."""
    call = latent_call(latent_form(
        dims=(8, 256), dtype=torch.float32, lengths=(0, 5, 64, 70), heads=4, queries=2
    ), "cpu")  # fmt: skip
    apart = call.given | {"v_cache": call.given["v_cache"].clone()}
    wanted = outcome(call.given)
    for given, checks in ((call.given, 1), (apart, 2), (apart, 3), (call.given, 3)):
        for one, other in zip(outcome(given)[:2], wanted, strict=False):
            assert_close(one, other, "rounding")
        assert seen.checked == checks
        assert (seen.ran[-1]["qv"] is None) == (given is apart)
    q, k_cache = call.given["q"], call.given["k_cache"]
    assert seen.ran[-1]["qv"].data_ptr() == q.data_ptr()
    assert seen.ran[-1]["k_cache"].data_ptr() == k_cache[..., 256:].data_ptr()


def test_a_mode_sees_the_op_that_it_knows(seen: Seen) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    given = Call(FORMS["read"]).given
    wanted = attention_with_cache(**given)
    found: list[str] = []
    with Names():
        out = attention_with_cache(**given)
    assert "cute_attention.cached_forward.output" in found
    assert_same_bits(out, wanted, "out")


def test_other_backends_have_no_plan(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(FORMS["read"])
    for _ in range(2):
        attention_with_cache(**call.given, backend="reference")
    assert not seen.ran and seen.checked == 2
    attention_with_cache(**call.given)
    attention_with_cache(**call.given)
    assert seen.checked == 3
    with use_backend("reference"):
        attention_with_cache(**call.given)
    assert seen.checked == 4
    monkeypatch.setenv("CUTE_ATTENTION_BACKEND", "reference")
    attention_with_cache(**call.given)
    assert seen.checked == 5 and len(seen.ran) == 2
    monkeypatch.delenv("CUTE_ATTENTION_BACKEND")
    attention_with_cache(**call.given)
    assert seen.checked == 5 and len(seen.ran) == 3


def test_tensors_that_the_op_gets_copies_of_have_no_plan(seen: Seen) -> None:
    call = Call(FORMS["read"])
    apart = torch.stack((call.given["cache_seqlens"],) * 2, 1)[:, 0]
    for _ in range(2):
        attention_with_cache(**{**call.given, "cache_seqlens": apart})
    assert seen.checked == 2 and not plans.plans


def test_an_op_that_refuses(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks say why; where they find nothing, the call is made again."""
    call = Call(FORMS["read"])
    wanted = attention_with_cache(**call.given)
    ((key, plan),) = plans.plans.items()

    def refuses(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(plans, "plans", {key: plan._replace(op=refuses)})
    assert_same_bits(attention_with_cache(**call.given), wanted, "out")
    assert seen.checked == 2 and plans.plans == {key: plan}


def test_plans_are_forgotten(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST", 3)
    call = Call(FORMS["read"])
    for splits in range(1, 8):
        attention_with_cache(**call.given, num_splits=splits)
        assert len(plans.plans) <= 3
