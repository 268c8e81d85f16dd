"""Which row of the tables a combination of score features gets: with rows that compute nothing in
the place of the real ones, on a machine without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_attention.dispatch.jit import best_rows
from cute_attention.native import core, rows
from cute_attention.problem import Problem
from test_dispatch import PREAMBLE, VERSION

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = ROOT / "tests" / "cpp" / "table_stand_in.cpp"
BITS = {"bias": 1, "alibi": 2, "dropout": 8}  # of Feature; softcap is a number of its own
SUBSETS = [subset for count in range(5) for subset in itertools.combinations(rows.EVERY, count)]
HEAD_DIMS = (40, 64, 96, 128, 192, 256)
DIRECTIONS = ("forward", "backward")
ARCHS = ("sm80", "sm90")
HOPPER = 227 * 1024  # bytes of shared memory

pytestmark = pytest.mark.skipif(not core.available(), reason="the core library is not installed")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    command = ["c++", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += [f'-DCUTE_ATTENTION_VERSION="{VERSION}"', f"-I{ROOT}/include", f"-I{ROOT}/src"]
    out = folder / "libcute_attention_tables.so"
    subprocess.run([*command, STAND_IN, "-o", out], check=True)
    return folder


def ask(code: str, tables: Path) -> object:
    """What `code` assigns to `answer`, in a process that has these rows alone."""
    environment = dict(os.environ, CUTE_ATTENTION_KERNEL_PATH=str(tables))
    command = [sys.executable, "-c", f"{code}\nimport json\nprint(json.dumps(answer))"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def asked(subset: tuple[str, ...]) -> dict[str, float]:
    """The members of a problem that say which features a call has."""
    return {
        "features": sum(BITS.get(name, 0) for name in subset),
        "softcap": 30.0 if "softcap" in subset else 0.0,
    }


@pytest.fixture(scope="module")
def chosen(tables: Path) -> dict[str, str]:
    """The row of each architecture, direction, head dim and subset."""
    questions = {
        f"{direction} {dim} {'+'.join(subset)}": {
            "direction": direction,
            "dtype": "bf16",
            "head_dim": dim,
            "head_dim_v": dim,
            **asked(subset),
        }
        for direction in DIRECTIONS
        for dim in HEAD_DIMS
        for subset in SUBSETS
    }
    code = f"""{PREAMBLE}
sizes = dict(heads=8, heads_kv=2, seqlen_q=1024, seqlen_k=1024)
answer = {{}}
for name, question in {questions}.items():
    found = [c.name for c in explain(Problem(**question, **sizes), 0) if c.chosen]
    for arch in {ARCHS}:
        answer[arch + " " + name] = [name for name in found if name.startswith(arch)]
"""
    answer = ask(code, tables)
    assert isinstance(answer, dict)
    assert all(len(names) <= 1 for names in answer.values())
    return {question: "".join(names) for question, names in answer.items()}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_every_combination_has_a_row(
    chosen: dict[str, str], subset: tuple[str, ...], dim: int, direction: str, arch: str
) -> None:
    """That which computes it and nothing else, where there is one; else that of every combination,
    of the smallest head dim that serves. The cost model may prefer the forward row for chips of 99
    KB."""
    short = {"forward": "fwd", "backward": "bwd"}[direction]
    exact = [
        row
        for row in rows.table()
        if (row.arch, row.direction, row.dtype) == (arch, direction, "bf16")
        and row.head_dim >= dim
        and row.head_dim_v >= dim
        and row.score_mods == subset
    ]
    name = chosen[f"{arch} {direction} {dim} {'+'.join(subset)}"]
    if exact:
        least = min(row.head_dim for row in exact)
        assert name in [row.name for row in exact if row.head_dim == least]
    else:
        least = min(size for size in (64, 128, 256) if size >= dim)
        assert name.removesuffix("_99kb") == f"{arch}_{short}_bf16_d{least}_every"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_head_dims_that_differ_are_served_by_the_largest(tables: Path, direction: str) -> None:
    code = f"""{PREAMBLE}
problem = Problem({direction!r}, "fp16", head_dim=192, head_dim_v=128, heads=8, heads_kv=2,
                  seqlen_q=512, seqlen_k=512, features=9)
answer = [c.name for c in explain(problem, 0) if c.chosen and c.name.startswith("sm90")]
"""
    short = {"forward": "fwd", "backward": "bwd"}[direction]
    assert ask(code, tables) == [f"sm90_{short}_fp16_d256_every"]


def test_a_row_of_one_feature_demands_it(tables: Path) -> None:
    code = f"""{PREAMBLE}
problem = Problem("forward", "bf16", head_dim=64, head_dim_v=64, heads=8, heads_kv=2, seqlen_q=512,
                  seqlen_k=512, features=8)
answer = {{c.name: c.reasons for c in explain(problem, 0)}}
"""
    reasons = ask(code, tables)
    assert isinstance(reasons, dict)
    assert reasons["sm90_fwd_bf16_d64_bias"] == [
        "it does not serve dropout",
        "it serves only calls with bias",
    ]
    assert reasons["sm90_fwd_bf16_d128_softcap_alibi"][1:] == [
        "it serves only calls with alibi_slopes",
        "it serves only calls with softcap",
    ]
    assert reasons["sm90_fwd_bf16_d64_every"] == reasons["sm90_fwd_bf16_d64_dropout"] == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_rows_that_are_built_when_a_call_asks_are_the_same(
    chosen: dict[str, str], subset: tuple[str, ...], arch: str
) -> None:
    for direction, dim in itertools.product(DIRECTIONS, HEAD_DIMS):
        problem = Problem(direction, "bf16", head_dim=dim, head_dim_v=dim, **asked(subset))  # type: ignore[arg-type]
        names = [row.name for row in best_rows(problem, arch, HOPPER)]
        assert chosen[f"{arch} {direction} {dim} {'+'.join(subset)}"] in names


def test_the_example_with_t5_dropout_and_sinks_runs_on_kernels(tables: Path) -> None:
    """What `examples/train_gpt.py --position t5 --dropout 0.1 --sink` tells attention."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import torch
from gpt.model import GPT, Shape
from cute_attention import call
from cute_attention.arguments import TABLE
from cute_attention.native.core import Problem, explain
import train_gpt

shape, recipe = train_gpt.settle(train_gpt.build_parser().parse_args(
    ["--device", "cpu", "--position", "t5", "--dropout", "0.1", "--sink"]))
options = GPT(shape, None).train().attention_options()
bits = sum(TABLE[name].bit for name in ("bias", "sink"))
assert set(options) == {{"bias", "sink", "dropout_p"}}
sizes = dict(dtype="bf16", batch=4, head_dim=shape.head_dim, head_dim_v=shape.head_dim,
             heads=shape.heads, heads_kv=shape.heads_kv, seqlen_q=shape.context,
             seqlen_k=shape.context, window_right=0, features=bits | 8)
answer = {{}}
for direction in ("forward", "backward"):
    found = explain(Problem(direction=direction, **sizes), 0)
    answer[direction] = [c.name for c in found if c.chosen and c.name.startswith("sm90")]
"""
    found = ask(code, tables)
    assert isinstance(found, dict)
    for direction, short in (("forward", "fwd"), ("backward", "bwd")):
        (name,) = found[direction]
        assert name.startswith(f"sm90_{short}_bf16_d") and name.endswith("_bias_dropout")
