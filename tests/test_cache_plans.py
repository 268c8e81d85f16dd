"""Calls with a cache that have been made before: no check, and the same results; whatever differs
is checked again. On the CPU plain PyTorch stands in for the kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_calls import Call, Form
from cute_attention.cache_arguments import CacheArguments
from cute_attention.inference import api, attention_with_cache, choice, lowered, plans
from test_cache_in_place import attend_cache
from tolerances import assert_close, assert_same_bits

CAUSAL = {"causal": True}


class Seen:
    """How often the op ran, and arguments were checked."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []
        self.checked = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    seen = Seen()
    library = torch.library.Library("cute_attention", "IMPL")

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        seen.ran.append(args)
        return attend_cache(*args)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return lowered.lowered_forward(CacheArguments(*args))

    library.impl("attend_cache", run, "CPU")
    library.impl("cached_forward", forward, "CPU")
    library.impl("cached_forward.output", lambda *args: forward(*args)[0], "CPU")
    monkeypatch.setattr(plans, "plans", {})
    monkeypatch.setattr(
        choice, "select", lambda asked, *_: "reference" if asked == "reference" else "sm80"
    )
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


def test_the_longest_length_may_grow(seen: Seen) -> None:
    call = Call(FORMS["read"])
    for longest in (70, 80, 10**6):
        attention_with_cache(**call.given, max_seqlen_k=longest)
        assert seen.ran[-1][11] == min(longest, 96)
    assert seen.checked == 1
    for wrong in (-1, True, 2.0):
        with pytest.raises((TypeError, ValueError), match="max_seqlen_k is"):
            attention_with_cache(**call.given, max_seqlen_k=wrong)


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


CHANGES: dict[str, Any] = {
    "q's shape": lambda given: given | {"q": given["q"][:-1]},
    "q's dtype": lambda given: given | {"q": given["q"].double()},
    "a gradient": lambda given: given | {"q": given["q"].clone().requires_grad_()},
    "the dtype of lengths": lambda given: given | {"cache_seqlens": given["cache_seqlens"].long()},
    "an option that is no int": lambda given: given | {"num_splits": 2.0},
    "an option": lambda given: given | {"causal": 1},
    "no such option": lambda given: given | {"caussal": True},
    "a list": lambda given: given | {"v_cache": [1.0]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_checked(change: str, seen: Seen) -> None:
    """With the message that the call has without a plan."""
    call = Call(FORMS["read"])
    wrong = CHANGES[change](call.given)
    with pytest.raises((TypeError, ValueError)) as before:
        attention_with_cache(**wrong)
    attention_with_cache(**call.given)
    attention_with_cache(**call.given)
    with pytest.raises(type(before.value), match=re.escape(str(before.value))):
        attention_with_cache(**wrong)


def test_other_backends_have_no_plan(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(FORMS["read"])
    for _ in range(2):
        attention_with_cache(**call.given, backend="reference")
    assert not seen.ran and seen.checked == 2
    attention_with_cache(**call.given)
    attention_with_cache(**call.given)
    assert seen.checked == 3
    monkeypatch.setenv("CUTE_ATTENTION_BACKEND", "reference")
    attention_with_cache(**call.given)
    assert seen.checked == 4 and len(seen.ran) == 2


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
    (plan,) = plans.plans.values()
    monkeypatch.setattr(plans, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    assert_same_bits(attention_with_cache(**call.given), wanted, "out")
    assert seen.checked == 2 and plan in plans.plans.values()


def test_plans_are_forgotten(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST", 3)
    call = Call(FORMS["read"])
    for splits in range(1, 8):
        attention_with_cache(**call.given, num_splits=splits)
        assert len(plans.plans) <= 3
