"""The demo's choices of positions, dropout and sinks: each learns, and tells attention what it
should."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from math import log
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from cute_attention import attention

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PROSE = "the cat sat on the mat and the dog lay by the log. " * 200
TINY = ["--device", "cpu", "--layers", "1", "--heads", "2", "--heads-kv", "1", "--head-dim", "16"]
TINY += ["--context", "32", "--batch", "8", "--steps", "90", "--learning-rate", "0.01"]
CHOICES = [
    ["--position", position, *others]
    for position in ("rotary", "alibi", "t5")
    for others in ([], ["--dropout", "0.1"], ["--sink"], ["--dropout", "0.1", "--sink"])
]


@pytest.fixture(scope="module", autouse=True)
def _examples_on_path() -> None:
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def demo():
    import train_gpt

    return train_gpt


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(PROSE)
    return path


def entropy_given_one_byte() -> float:
    """The least loss, in nats per byte, of a model that sees no byte but the last."""
    pairs, firsts = Counter(itertools.pairwise(PROSE)), Counter(PROSE[:-1])
    return -sum(n * log(n / firsts[a]) for (a, _), n in pairs.items()) / (len(PROSE) - 1)


def trained(demo, prose, attend, options):
    from gpt.text import load_text
    from gpt.training import train

    shape, recipe = demo.settle(demo.build_parser().parse_args([*TINY, *options]))
    return train("run", attend, shape, load_text([prose], shape.context), recipe)


@pytest.mark.parametrize("options", CHOICES, ids=" ".join)
def test_it_learns_what_needs_attention(demo, prose, options):
    run = trained(demo, prose, functools.partial(attention, causal=True), options)
    assert run.held_out[-1][1] < 0.85 * entropy_given_one_byte()


def test_without_attention_it_does_not(demo, prose):
    """So the bound of the other test means something."""
    run = trained(demo, prose, lambda q, k, v: torch.zeros_like(q), [])
    assert 1.0 < run.held_out[-1][1] / entropy_given_one_byte() < 1.05


@pytest.mark.parametrize("position", ["rotary", "alibi", "t5"])
def test_what_attention_is_told(position):
    """All layers share slopes and bias, each has its sink, and only training drops."""
    from gpt.model import GPT, Shape

    told = []

    def attend(q, k, v, **options):
        told.append(options)
        return attention(q, k, v, causal=True, **options)

    torch.manual_seed(0)
    model = GPT(Shape(2, 4, 2, 16, 32, position=position, sink=True, dropout=0.25), attend)
    tokens = torch.randint(256, (2, 32))
    model(tokens).square().sum().backward()
    model.eval()
    model(tokens)
    shared = {"rotary": set(), "alibi": {"alibi_slopes"}, "t5": {"bias"}}[position]
    assert [set(options) for options in told] == [shared | {"sink", "dropout_p"}] * 2 + [
        shared | {"sink"}
    ] * 2
    assert [options["dropout_p"] for options in told[:2]] == [0.25, 0.25]
    for name in shared:
        assert told[0][name] is told[1][name]
    sinks = [block.attention.sink for block in model.blocks]
    for options, sink in zip(told[:2], sinks, strict=True):
        assert options["sink"] is sink
        assert sink.grad.abs().min() > 0
    if position == "t5":
        assert model.position.table.grad[:16].abs().min() > 0
    model.train()
    assert set(model.attention_options()) == set(told[0])


def test_same_seed_same_dropout(demo, prose):
    """The seeds of dropout come from PyTorch's generator, which the demo seeds."""
    options = ["--dropout", "0.2", "--steps", "4"]
    attend = functools.partial(attention, causal=True)
    runs = [trained(demo, prose, attend, [*options, "--seed", seed]) for seed in ("1", "1")]
    without = trained(demo, prose, attend, [*options, "--seed", "1", "--dropout", "0"])
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses != without.losses
    assert runs[0].held_out[0] == without.held_out[0]  # nothing is dropped there


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (5, 5), (1, 200), (3, 200), (40, 41)])
def test_relative_bias(seqlen_q, seqlen_k):
    """A value for each head and bucket, as a loop over queries and keys gives it; gradients too."""
    from gpt.position import RelativeBias, bucket_of

    torch.manual_seed(0)
    position = RelativeBias(heads=3, head_dim=8)
    position.initialise()
    queries = torch.arange(seqlen_k - seqlen_q, seqlen_k)
    distances = (queries[:, None] - torch.arange(seqlen_k)).clamp(min=0)
    expected = position.table[bucket_of(distances)].permute(2, 0, 1)[None]
    bias = position(queries, seqlen_k).options["bias"]
    assert torch.equal(bias, expected)
    weights = torch.randn_like(expected)
    grads = [torch.autograd.grad((b * weights).sum(), position.table)[0] for b in (bias, expected)]
    torch.testing.assert_close(*grads)


def test_buckets_are_those_of_t5():
    models = pytest.importorskip("transformers.models.t5.modeling_t5", exc_type=ImportError)
    from gpt.position import bucket_of

    distances = torch.arange(3000)
    theirs = models.T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=32, max_distance=128
    )
    assert torch.equal(bucket_of(distances), theirs)


def test_slopes_are_those_of_the_paper():
    from gpt.position import alibi_slopes

    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    expected = [2.0**-n for n in range(1, 9)] + [2.0**-n for n in (0.5, 1.5, 2.5, 3.5)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(expected))


@pytest.mark.parametrize("position", ["alibi", "t5"])
def test_comparison_with_pytorchs_mask(demo, prose, tmp_path, capsys, position):
    options = ["--position", position, "--compare", "--sample-bytes", "0"]
    assert demo.main([*TINY, *options, "--output", str(tmp_path), str(prose)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("PASS") == 2
    (line,) = [line for line in printed.splitlines() if "PyTorch, blockwise" in line]
    assert line.startswith("| " if position == "alibi" else "not measured: ")  # no gradient there


def test_comparison_with_dropout_judges_no_curves(demo, prose, tmp_path, capsys):
    options = ["--dropout", "0.1", "--compare", "--sample-bytes", "0", "--output", str(tmp_path)]
    assert demo.main([*TINY, *options, str(prose)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("PASS") == 1
    assert "not judged: the two loss curves" in printed


def test_cudnn_is_not_measured_with_a_learned_bias():
    """It would train another model: its gradient of the bias is missing."""
    from gpt.step_time import TorchAttention

    q = k = v = torch.randn(1, 8, 2, 16)
    bias = torch.zeros(1, 2, 8, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="has no gradient of a bias"):
        TorchAttention(SDPBackend.CUDNN_ATTENTION)(q, k, v, bias=bias)
