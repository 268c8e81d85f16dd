"""Every change to every tensor of a call with a cache that has been made before: what comes of it,
results or an error, is what comes of it in a call that was not made before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cache_calls import Call, Form
from cute_attention.inference import explain_with_cache, plans
from latent_calls import latent_call, latent_form, with_qv
from test_cache_plans import CAUSAL, Seen, outcome, seen  # noqa: F401  (a fixture)
from tolerances import assert_same_bits

EVERYTHING = {
    "dense": Form(new=2, queries=2, rotary="halves", batch_idx=True, leftpad=True, options=CAUSAL),
    "pages": Form(new=2, queries=2, page_size=16, rotary="interleaved partial", options=CAUSAL),
    "packed": Form(new=1, packed=True, page_size=48, batch_idx=True, options={"window": (9, 0)}),
    "read": Form(queries=2),
}
FORMS = (*EVERYTHING, "latent", "with qv")
CHANGES: dict[str, Callable[[Any], Any]] = {
    "int64": lambda t: t.long() if not t.is_floating_point() else None,
    "a float": lambda t: t.double(),
    "fp8": lambda t: t.to(torch.float8_e4m3fn) if t.is_floating_point() else None,
    "bf16": lambda t: t.bfloat16() if t.is_floating_point() else None,
    "shorter": lambda t: t[:-1],
    "a row more": lambda t: torch.cat((t, t[:1])),
    "narrower": lambda t: t[..., :-1],
    "eight columns less": lambda t: t[..., :-8] if t.dim() > 1 and t.shape[-1] > 8 else None,
    "a head less": lambda t: t[..., :-1, :] if t.dim() > 2 else None,
    "a dimension more": lambda t: t[None],
    "a dimension less": lambda t: t[0],
    "other strides": lambda t: torch.stack((t, t), -1)[..., 0],
    "other strides of rows": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "rows that kernels do not read": lambda t: torch.cat((t, t[..., :1]), -1)[..., :-1],
    "turned over": lambda t: t.mT.contiguous().mT if t.dim() > 1 else None,
    "an odd address": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
    "a gradient": lambda t: t.clone().requires_grad_() if t.is_floating_point() else None,
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "none": lambda t: [],
    "a list": lambda t: t.tolist(),
    "a number": lambda t: t.flatten()[0],
    "on no device": lambda t: t.to("meta"),
}
TENSORS = (
    "q", "k_cache", "v_cache", "cache_seqlens", "k", "v", "block_table", "cu_seqlens_q", "leftpad",
    "cu_seqlens_k_new", "cache_batch_idx", "rotary_cos", "rotary_sin", "rotary_seqlens",
    "alibi_slopes", "sink", "qv",
)  # fmt: skip
# No check sees these, with a plan or without one: rows or pages that are named would not be there.
UNSEEN = {("packed", name, "shorter") for name in ("q", "k", "v")}
UNSEEN |= {(form, "block_table", change) for form in FORMS for change in ("narrower", "none")}


def with_everything(name: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The arguments of a form, and what the forms of `Call` do not have."""
    if name not in EVERYTHING:
        call = latent_call(latent_form(lengths=(5, 64, 70, 40), page_size=16, dtype=dtype), device)
        return call.given if name == "latent" else with_qv(call)
    form = Form(**{**vars(EVERYTHING[name]), "dtype": dtype})
    given = Call(form, device).given
    slopes = torch.rand(4, device=device)
    given |= {"sink": slopes - 1} if name == "pages" else {}
    if name in ("dense", "read"):
        given["alibi_slopes"] = slopes
    if name == "dense":
        given["rotary_seqlens"] = given["cache_seqlens"] // 2
    return given


def check_changes(name: str, tensor: str, dtype: torch.dtype, device: str) -> int:
    """Makes the call of a form with every change of a tensor, with a plan and without one. Returns
    how many were refused."""
    right = with_everything(name, dtype, device)
    refused = 0
    for change, changed in CHANGES.items():
        value = None if (name, tensor, change) in UNSEEN else changed(right[tensor])
        if value is None:
            continue
        given = right | {tensor: None if change == "none" else value}
        plans.plans.clear()
        wanted = outcome(given)
        outcome(right)
        if isinstance(wanted[0], type):
            refused += 1
            assert outcome(given) == wanted, f"{tensor}: {change}"
            continue
        for one, other in zip(outcome(given), wanted, strict=True):
            assert_same_bits(one, other, f"{tensor}: {change}")
    return refused


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("form", FORMS)
def test_what_differs_is_as_without_a_plan(form: str, tensor: str, seen: Seen) -> None:  # noqa: F811
    if tensor not in with_everything(form, torch.float32, "cpu"):
        return
    assert check_changes(form, tensor, torch.float32, "cpu") > 3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::cute_attention.FallbackWarning")
@pytest.mark.parametrize("form", FORMS)
def test_the_binding_refuses_what_the_checks_refuse(form: str) -> None:
    right = with_everything(form, torch.float16, "cuda")
    if explain_with_cache(**right).chosen == "reference":
        pytest.skip("no kernel serves this GPU")
    outcome(right)
    assert plans.plans, "the call has a plan"
    refused = sum(
        check_changes(form, name, torch.float16, "cuda") for name in TENSORS & right.keys()
    )
    assert refused > 40
