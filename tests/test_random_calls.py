"""Random legal calls: a fixed set of seeds on a GPU, and on the CPU whether the generator makes
legal calls and its check notices what is wrong."""

from __future__ import annotations

import pytest
import torch

from random_calls import GPU_WAYS, ON_CPU, Limits, draw
from random_checks import Wrong, check, compare, run
from random_tensors import make

SMALL = Limits(scores=20_000)
ON_GPU = Limits(scores=300_000, ways=ON_CPU + GPU_WAYS, poison=("bias",))
DENSE = Limits(scores=20_000, kinds=("dense", "packed"))


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_calls_are_legal_and_the_reference_backend_is_right(first: int) -> None:
    for seed in range(first, first + 20):
        check(draw(seed, SMALL), "cpu", "reference")


def test_a_call_is_a_function_of_its_seed() -> None:
    one, other = (make(draw(5, DENSE), "cpu") for _ in range(2))
    assert one.drawn == other.drawn
    for left, right in zip(one.tensors, other.tensors, strict=True):
        assert torch.equal(left.nan_to_num(), right.nan_to_num())


def test_a_wrong_result_is_noticed() -> None:
    """Of each result the largest number is changed. Inputs are standard normal: in others one
    number may be all rounding."""
    noticed = set()
    for call in (draw(seed, DENSE) for seed in range(120)):
        if call.numbers != "normal" or call.options:
            continue
        made = make(call, "cpu")
        found = run(made, "reference")
        compare(made, found)
        for name, result in found.items():
            if not result.numel() or result.double().abs().nan_to_num(0, 0, 0).max() < 1e-3:
                continue
            if name == "dbias" and "k" not in str(call.bias):
                continue  # what serves all keys alike has a gradient of 0
            wrong = result.clone()
            place = wrong.double().abs().nan_to_num(0, 0, 0).argmax()
            wrong.view(-1)[place] *= 1.25
            with pytest.raises(Wrong, match=name):
                compare(made, {**found, name: wrong})
            noticed.add(name)
    assert noticed == {"out", "lse", "dq", "dk", "dv", "dbias", "dsink"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::cute_attention.FallbackWarning")
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_on_a_gpu(first: int) -> None:
    wrong = []
    for seed in range(first, first + 50):
        call = draw(seed, ON_GPU)
        try:
            check(call, "cuda")
        except Wrong as error:
            wrong.append(f"--seed {seed} --scores {ON_GPU.scores}: {error}: {call}")
    assert not wrong, "\n".join(wrong)
