"""The adversarial inputs are what their names say, and the check of results catches the faults that
an online softmax can have."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_attention import attention_reference
from cute_attention.bench.adversarial import ADVERSARIAL, Adversarial, select
from cute_attention.bench.roundings import LIMITS, NAMES, Exact, exact
from every_row import DTYPES

LENGTHS = (70, 700)  # of queries and keys
TILE = 64  # keys of a tile of the emulated kernel


def make(
    entry: Adversarial, dtype: torch.dtype, lengths: tuple[int, int] = LENGTHS, dim: int = 64
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return entry.make(torch.randn(1, lengths[0], 2, dim), torch.randn(1, lengths[1], 1, dim), dtype)


def levels(name: str, dtype: torch.dtype, dim: int = 64) -> Tensor:
    """What the first two channels add to the scaled scores, float64 [keys]. It is the same for
    every query."""
    q, k = make(ADVERSARIAL[name], dtype, dim=dim)
    parts = torch.einsum("bihd,bjd->bhij", q.double()[..., :2], k.double()[:, :, 0, :2])
    assert (parts == parts[:, :, :1]).all()
    return parts[0, 0, 0] * dim**-0.5


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(("name", "key"), [("left", 0), ("middle", 350), ("right", 699)])
def test_a_sink_stands_90_above(name: str, key: int, dim: int, dtype: torch.dtype) -> None:
    level = levels(f"sink_{name}", dtype, dim)
    assert level[key].item() == pytest.approx(90, rel=1e-4)
    assert level.count_nonzero() == 1


@pytest.mark.parametrize(("name", "sign"), [("left", -1), ("right", 1)])
def test_a_slope_grows_by_2_a_key(name: str, sign: int, dtype: torch.dtype) -> None:
    steps = levels(f"slope_{name}", dtype).diff()
    assert torch.equal(steps, torch.full_like(steps, 2.0 * sign))


@pytest.mark.parametrize("step", [20, 80, 300])
@pytest.mark.parametrize("tile", [64, 128])
def test_steps_are_as_high_as_they_say(tile: int, step: int, dtype: torch.dtype) -> None:
    flat = torch.arange(699) % tile != tile - 1  # keys followed by one of the same tile
    walked = torch.arange(699 // tile, 0, -1, dtype=torch.float64)  # tiles behind, but for the last
    heights = {
        "left": torch.full_like(walked, -step),
        "right": torch.full_like(walked, step),
        "alternating": step * (2 * walked - 1) * (-1) ** walked * -1,
    }
    for way, expected in heights.items():
        steps = levels(f"steps_{step}_per_{tile}_{way}", dtype).diff()
        assert steps[flat].abs().max() == 0
        assert torch.allclose(steps[~flat], expected, rtol=1e-3), way


@pytest.mark.parametrize("place", ["first", "middle", "last", "all_but_one", "alternating"])
def test_hidden_keys_are_hidden(place: str, dtype: torch.dtype) -> None:
    key = torch.arange(700)
    hidden = {
        "first": key >= 508,
        "middle": (key >= 158) & (key <= 542),
        "last": key < 192,
        "all_but_one": key != 315,  # in the middle of the 631 that the first causal query sees
        "alternating": key % 256 >= 128,
    }[place]
    values = {"1e4": -1e4, "lowest": torch.finfo(dtype).min, "inf": -math.inf}
    if dtype == torch.bfloat16:
        values["1e30"] = -1e30
    names = {entry.name for entry in select(["hidden"], dtype) if entry.name.endswith(place)}
    assert names == {f"hidden_{value}_{place}" for value in values}
    for name, value in [*((f"hidden_{n}", v) for n, v in values.items()), ("raised_1e4", 1e4)]:
        q, k = make(ADVERSARIAL[f"{name}_{place}"], dtype)
        assert q[..., 0].eq(1).all()
        assert torch.equal(k[0, :, 0, 0], torch.where(hidden, value, 0.0).to(dtype)), name


def test_equal_scores_are_equal(dtype: torch.dtype) -> None:
    for name, score in (("equal_high", 1e4), ("equal_low", -1e4)):
        q, k = make(ADVERSARIAL[name], dtype)
        scores = torch.einsum("bihd,bjd->bhij", q.double(), k.double()[:, :, 0]) * 0.125
        assert torch.equal(scores, torch.full_like(scores, scores[0, 0, 0, 0].item()))
        assert scores[0, 0, 0, 0].item() == pytest.approx(score, rel=1e-4)


def test_one_row_in_64_is_extreme(dtype: torch.dtype) -> None:
    for name, ordinary, extreme in (("mix_x100", 10, 100), ("mix_slope", 10, 1000)):
        q, k = make(ADVERSARIAL[name], dtype)
        scores = torch.einsum("bihd,bjd->bhij", q.double(), k.double()[:, :, 0]) * 0.125
        largest = scores.abs().amax(-1)[0, 0]
        chosen = torch.arange(LENGTHS[0]) % 64 == 0
        assert largest[chosen].min() > extreme and largest[~chosen].max() < ordinary


@pytest.mark.parametrize("factor", [1, 3, 10, 30, 100, 300])
def test_random_scores_have_their_deviation(factor: int, dtype: torch.dtype) -> None:
    q, k = make(ADVERSARIAL[f"random_x{factor}"], dtype)
    scores = torch.einsum("bihd,bjd->bhij", q.double(), k.double()[:, :, 0]) * 0.125
    assert scores.std().item() == pytest.approx(factor, rel=0.05)


def truth(entry: Adversarial, dtype: torch.dtype, causal: bool) -> tuple[Exact, tuple[Tensor, ...]]:
    q, k = make(entry, dtype)
    v, grad_out = torch.randn(1, 700, 1, 32).to(dtype), torch.randn(1, LENGTHS[0], 2, 32).to(dtype)
    return exact(q, k, v, grad_out, causal=causal), (q, k, v, grad_out)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_float64_is_that_of_the_direct_formula_and_finite(causal: bool, dtype: torch.dtype) -> None:
    """All results are finite, except for the gradient of q where keys hold -infinity: there it is 0
    times infinity, which is NaN."""
    for entry in select(["all"], dtype):
        found, (q, k, v, grad_out) = truth(entry, dtype, causal)
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        out, lse = attention_reference(*leaves, causal=causal, return_lse=True)
        grads = torch.autograd.grad(out, leaves, grad_out.double())
        for name, expected in zip(NAMES, (out, lse, *grads), strict=True):
            value = found.values[name]
            finite = value.isfinite()
            assert torch.equal(finite, expected.isfinite()), entry.name
            hidden = entry.name.startswith("hidden_inf") and name == "dq"
            assert finite[..., int(hidden) :].all() and finite.all() != hidden, entry.name
            error = (value - expected)[finite].abs().max()
            assert error <= 1e-9 * max(1.0, expected[finite].abs().max()), (entry.name, name)


@pytest.mark.parametrize("lengths", [(300, 300), (1, 900), (40, 45)])
def test_every_causal_query_has_a_finite_score(
    lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    for entry in select(["hidden"], dtype):
        q, k = make(entry, dtype, lengths)
        v = torch.ones(1, lengths[1], 1, 8, dtype=torch.float64)
        out = attention_reference(q.double(), k.double(), v, causal=True)
        assert (out - 1).abs().max() < 1e-9, entry.name


# --- the check -----------------------------------------------------------------------------------


def tiles_forward(q: Tensor, k: Tensor, v: Tensor, fault: str = "") -> tuple[Tensor, Tensor]:
    """The output and the LSE of an emulated kernel: an online softmax over tiles from right to
    left, with P rounded for the tensor cores. `fault` names the mistake that it makes."""
    dtype = q.dtype
    q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
    shape = (*q.shape[:3], 1)
    top, total = torch.full(shape, -math.inf), torch.zeros(shape)
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    starts = range((k.shape[2] - 1) // TILE * TILE, -1, -TILE)
    for index, start in enumerate(starts):
        scores = q @ k[:, :, start : start + TILE].mT * q.shape[-1] ** -0.5
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        if fault == "old maximum after the first tile" and index:
            new_top = top
        base = new_top if fault == "-inf - -inf" else new_top.masked_fill(new_top.isinf(), 0.0)
        factor = torch.exp(top - base)
        p = torch.exp(scores - base)
        part = p.to(dtype).float() @ v[:, :, start : start + TILE]
        if fault == "a tile dropped" and index == 3:
            p, part = torch.zeros_like(p), torch.zeros_like(part)
        total = total * factor + p.sum(-1, keepdim=True)
        out = (out if fault == "output not rescaled" else out * factor) + part
        top = new_top
    lse = (top + total.log())[..., 0]
    out = (out / total).transpose(1, 2).to(dtype)
    if fault == "rows of one warp erased":
        out[:, 16:32] = 0
    if fault == "LSE of one row":
        lse[:, 0, 50] = -math.inf
    return out, lse


def roundings(entry: Adversarial, dtype: torch.dtype, fault: str = "") -> dict[str, float]:
    found, (q, k, v, _) = truth(entry, dtype, causal=False)
    out, lse = tiles_forward(q, k, v, fault)
    return {
        name: float(found.roundings(name, result).max())
        for name, result in (("out", out), ("lse", lse))
    }


def test_a_right_softmax_passes_everywhere(dtype: torch.dtype) -> None:
    for entry in select(["all"], dtype):
        for name, value in roundings(entry, dtype).items():
            assert value <= LIMITS[name] / 2, entry.name


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("old maximum after the first tile", "sink_left"),
        ("old maximum after the first tile", "steps_300_per_64_left"),
        ("old maximum after the first tile", "hidden_inf_first"),
        ("-inf - -inf", "hidden_inf_first"),
        ("output not rescaled", "random_x10"),
        ("output not rescaled", "slope_left"),
        ("a tile dropped", "random_x1"),
        ("a tile dropped", "equal_high"),
        ("a tile dropped", "hidden_1e4_first"),
        ("rows of one warp erased", "random_x1"),
        ("LSE of one row", "random_x1"),
    ],
)
def test_a_fault_is_caught(fault: str, caught_by: str, dtype: torch.dtype) -> None:
    found = roundings(ADVERSARIAL[caught_by], dtype, fault)
    assert any(value > 3 * LIMITS[name] for name, value in found.items()), found


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t * 1.05,
        lambda t: t.index_fill(1, torch.tensor([t.shape[1] - 30]), 0.0),
        lambda t: t.roll(1, 1),
    ],
    ids=["5 % too large", "a row erased", "rows moved"],
)
def test_wrong_gradients_are_caught(spoil: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Faults are caught in the gradients of random inputs, and in those of a slope, which are near
    0 except at a few keys."""
    for name in ("random_x1", "slope_right"):
        found, _ = truth(ADVERSARIAL[name], dtype, causal=True)
        for grad in ("dq", "dk", "dv"):
            right = found.values[grad].to(dtype)
            assert float(found.roundings(grad, right).max()) <= 1
            wrong = spoil(found.values[grad]).to(dtype)
            assert float(found.roundings(grad, wrong).max()) > LIMITS[grad], (name, grad)
