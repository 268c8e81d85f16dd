"""examples/pair_bias.py: triangle attention with a learned bias equals PyTorch's with a mask, and
the example measures, draws, and names its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL = ["--device", "cpu", "--channels", "16", "--heads", "2", "--head-dim", "8"]
SMALL += ["--time-ms", "1", "--residues", "6,9"]


@pytest.fixture(scope="module", autouse=True)
def _examples_on_path() -> None:
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def example():
    import pair_bias

    return pair_bias


def gradients(attend, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = attend(*leaves)
    torch.manual_seed(3)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out))]


@pytest.mark.parametrize("hidden", [0.0, 0.4], ids=["whole", "hidden pairs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_equals_pytorchs(dtype, hidden):
    """Output and gradients of q, k, v and the bias, which the rows share; some pairs hidden."""
    from pair.block import TorchAttention, our_attention

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 13, 13, 4, 8, dtype=dtype).unbind()
    bias = 3 * torch.randn(1, 4, 13, 13, dtype=dtype)
    seen = torch.rand(bias.shape) >= hidden
    seen[..., 0] = True  # PyTorch's gradients are NaN where a query sees no key
    tensors = (q, k, v, bias.masked_fill(~seen, -torch.inf))
    ours = gradients(our_attention, tensors)
    theirs = gradients(TorchAttention(SDPBackend.MATH), tensors)
    assert ours[4].shape == bias.shape
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_block_equals_one_that_loops_over_rows_and_heads():
    """A row's scores get the bias of the pair of query and key, and each head its own gate."""
    from pair.block import TriangleAttention, our_attention

    torch.manual_seed(0)
    residues, heads, head_dim = 5, 3, 4
    block = TriangleAttention(7, heads, head_dim, our_attention).double()
    pair = torch.randn(residues, residues, 7, dtype=torch.float64)
    x = block.norm(pair)
    rows = []
    for i in range(residues):
        parts = []
        for h in range(heads):
            own = slice(h * head_dim, (h + 1) * head_dim)
            q, k, v = (w[own] for w in block.qkv.weight.chunk(3))
            scores = (x[i] @ q.T) @ (x[i] @ k.T).T / head_dim**0.5
            scores = scores + x @ block.bias.weight[h]  # of pair (query, key), whatever the row
            gate = torch.sigmoid(block.gate(x[i]))[:, own]
            parts.append(gate * (torch.softmax(scores, dim=-1) @ (x[i] @ v.T)))
        rows.append(block.out(torch.cat(parts, dim=-1)))
    expected = torch.stack(rows)
    torch.testing.assert_close(block(pair), expected, atol=1e-12, rtol=1e-12)


def test_all_gradients_of_the_block_equal_pytorchs(example):
    from pair.block import TorchAttention, our_attention
    from pair.measure import Shape, deviations, results

    shape = Shape(12, 3, 8, torch.device("cpu"), torch.float32)
    peer = TorchAttention(SDPBackend.MATH)
    found = deviations(our_attention, peer, shape, 11)
    assert [d.what.removeprefix("gradient of ") for d in found] == [
        "output", "the pair", "norm.weight", "norm.bias", "qkv.weight", "bias.weight",
        "gate.weight", "gate.bias", "out.weight", "out.bias",
    ]  # fmt: skip
    assert max(deviation.ours for deviation in found) < 5e-6
    exact, theirs = (results(a, shape, 11, torch.float64) for a in (our_attention, peer))
    for what, value in exact.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(value, theirs[what], atol=1e-11, rtol=1e-11, msg=what)


def test_it_compares_measures_and_draws(example, tmp_path, capsys):
    assert example.main([*SMALL, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("no GPU is used: small sizes on the CPU")
    assert "PASS: errors of at most twice MATH (SDPA)'s" in printed
    text = (tmp_path / "pair_bias.md").read_text()
    assert text in printed
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip() for row in rows] == ["6"] * 4 + ["9"] * 4
    for row in rows:
        ours, theirs, speed, *memory = (float(cell) for cell in row[2:])
        assert min(ours, theirs, *memory) > 0
        assert speed == pytest.approx(theirs / ours, rel=0.02, abs=0.01)  # all are rounded
    image = matplotlib.image.imread(tmp_path / "pair_bias.png")
    assert image[..., :3].std() > 0.05  # not blank


def test_wrong_results_fail(example, tmp_path, capsys, monkeypatch):
    """A bias without its gradient trains another model."""
    ours = example.our_attention
    monkeypatch.setattr(
        example, "our_attention", lambda q, k, v, b: ours(q, k, v, b.detach() + 0 * b)
    )
    assert example.main([*SMALL, "--output", str(tmp_path)]) == 1
    assert "FAIL: errors of at most twice" in capsys.readouterr().out


def test_what_is_refused_has_a_reason_in_place_of_figures():
    from pair.block import our_attention
    from pair.measure import WHAT, Shape, measure
    from pair.report import table

    def refuses(*tensors: Tensor) -> Tensor:
        raise RuntimeError("No available kernel.\nmore")

    shape = Shape(8, 2, 4, torch.device("cpu"), torch.float32)
    found = measure({"ours": our_attention, "theirs": refuses}, shape, 4, 1.0)
    assert [(f.name, f.what) for f in found] == [(n, w) for w in WHAT for n in ("ours", "theirs")]
    lines = table(found).splitlines()
    for line in lines[2:6]:
        cells = [cell.strip() for cell in line.split("|")[3:-1]]
        assert [cell == "-" for cell in cells] == [False, True, True, False, True]
    assert sum(line.startswith("not measured: theirs, 4 residues") for line in lines) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--residues", "8,0"], "argument --residues: '0' is not a positive whole number"),
        (["--heads", "many"], "argument --heads: 'many' is not a positive whole number"),
        (["--device", "meta"], "argument --device: invalid choice: 'meta'"),
        (["--backend", "sm80"], "sm80"),
        (["--output", "FILE"], "File exists"),
    ],
)
def test_wrong_arguments(example, tmp_path, capsys, options, message):
    (tmp_path / "file").write_text("")
    options = [str(tmp_path / "file") if option == "FILE" else option for option in options]
    with pytest.raises(SystemExit) as caught:
        example.main([*SMALL, "--output", str(tmp_path), *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
