"""The table of arguments, and what is derived from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cute_attention.arguments import (
    EXTRA_DEFAULTS,
    EXTRAS,
    FEATURES,
    GRADIENTS,
    NAMES,
    OPTIONAL_GRADIENTS,
    Arguments,
    feature_words,
    kind_of,
    problem_of,
)
from cute_attention.checked import checked
from cute_attention.native import core
from cute_attention.ops.schema import KERNELS, REFERENCE, Family
from cute_attention.options import DEFAULTS
from cute_attention.problem import Problem

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("family", [KERNELS, REFERENCE], ids=["kernels", "reference"])
def test_one_schema_for_all_backends(family: Family) -> None:
    def names(op: object) -> list[str]:
        return [argument.name for argument in op._schema.arguments]  # type: ignore[attr-defined]

    assert names(family.forward) == names(family.output) == list(NAMES)
    before = ["grad_out", "grad_lse", "out", "lse", "deterministic"]
    needs = [f"needs_{name}" for name in OPTIONAL_GRADIENTS]
    assert names(family.backward) == [*before, *NAMES, *needs]
    results = [result.name for result in family.backward._schema.returns]
    assert results == [f"d{name}" for name in GRADIENTS]
    defaults = [argument.default_value for argument in family.forward._schema.arguments]
    assert tuple(defaults[-len(EXTRAS) :]) == EXTRA_DEFAULTS


def test_feature_bits_are_those_of_the_core() -> None:
    header = (ROOT / "include" / "cute_attention" / "config.h").read_text()
    enum = re.search(r"enum Feature : uint32_t \{(.*?)\};", header, re.S)
    assert enum is not None
    found = {int(bit): name.lower() for name, bit in re.findall(r"k(\w+) = (\d+),", enum[1])}
    assert found.pop(32) == "softcap"  # a number in Problem, from which the core makes the bit
    assert found.pop(64) == "cache"  # of calls with a cache, which every row that they reach reads
    assert found.pop(128) == "qv"  # only calls with a cache have it
    assert found == {bit: word.replace(" ", "") for bit, word in FEATURES.items()}


def test_problem_is_that_of_the_core() -> None:
    """Field by field, since it is passed on as it lies in memory."""
    header = (ROOT / "include" / "cute_attention" / "c_api.h").read_text()
    struct = re.search(r"struct Problem \{(.*?)\n\};", header, re.S)
    assert struct is not None
    fields = re.findall(r"^  (\w+) (\w+)(?: = \w+)?;", struct[1], re.M)
    expected = [name for name in Problem._fields if name != "device"]
    assert [name for _, name in fields] == expected
    assert [name for name, _ in core._Problem._fields_] == expected


def call(**options: object) -> Arguments:
    q, k = torch.ones(2, 5, 4, 16), torch.ones(2, 7, 2, 16)
    return checked("attention", q, k, k, (), {**DEFAULTS, **options})


ASKED: dict[str, tuple[dict[str, object], list[str]]] = {
    "nothing": ({}, []),
    "softcap": ({"softcap": 3.0}, ["softcap"]),
    "softcap of 0": ({"softcap": 0}, []),
    "scale": ({"scale": -1.0}, ["nonpositive scale"]),
    "scale that fp32 flushes to 0": ({"scale": 2.0**-126 * 0.9}, ["nonpositive scale"]),
    "scale that is 0 in fp32": ({"scale": 1e-60}, ["nonpositive scale"]),
    "least scale": ({"scale": 2.0**-126}, []),
    "bias": ({"bias": torch.ones(5, 7)}, ["bias"]),
    "slopes": ({"alibi_slopes": torch.ones(4)}, ["alibi"]),
    "sink": ({"sink": torch.ones(4)}, ["sink"]),
    "dropout": ({"dropout_p": 0.5}, ["dropout"]),
    "seed alone": ({"dropout_seed": 5}, []),
}


@pytest.mark.parametrize(("options", "words"), ASKED.values(), ids=ASKED)
def test_features(options: dict[str, object], words: list[str]) -> None:
    asked = call(**options)
    assert feature_words(asked) == words
    bits = {word: bit for bit, word in FEATURES.items()}
    assert kind_of(asked).features == sum(bits.get(word, 0) for word in words)


def test_problems_of_calls() -> None:
    asked = call(causal=True, window=(3, 9), softcap=2.0)
    assert kind_of(asked) == Problem(
        dtype="fp32", head_dim=16, head_dim_v=16, window_left=0, window_right=0, softcap=1.0,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert problem_of(asked) == kind_of(asked)._replace(
        batch=2, seqlen_q=5, seqlen_k=7, heads=4, heads_kv=2, window_left=3, softcap=2.0
    )


def test_checked_arguments_have_one_form() -> None:
    bias = torch.ones(7)
    asked = call(bias=bias, dropout_p=0.5, dropout_seed=3, window=(2, None))
    assert isinstance(asked.bias, Tensor) and asked.bias.shape == (1, 1, 1, 7)
    assert isinstance(asked.dropout_seed, Tensor) and asked.dropout_seed.tolist() == [3]
    assert (asked.window_left, asked.window_right) == (2, -1)
    assert (asked.scale, asked.softcap) == (0.25, 0.0)
    assert call()[-len(EXTRAS) :] == EXTRA_DEFAULTS
