"""The demo, end to end at a tiny size: it learns, draws, writes, compares, and names its errors."""

from __future__ import annotations

import csv
import functools
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch

from cute_attention import attention

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY = ["--device", "cpu", "--layers", "1", "--heads", "2", "--heads-kv", "1", "--head-dim", "16"]
TINY += ["--context", "32", "--batch", "8", "--steps", "60", "--learning-rate", "0.01"]


@pytest.fixture(scope="module", autouse=True)
def _examples_on_path() -> None:
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def demo():
    import train_gpt

    return train_gpt


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("the cat sat on the mat and the dog lay by the log. " * 200)
    return str(path)


def _losses(folder: Path) -> dict[str, list[float]]:
    with (folder / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}


def test_it_learns_compares_and_draws(demo, prose, tmp_path, capsys):
    options = ["--compare", "--prompt", "the ", "--sample-bytes", "200", "--output", str(tmp_path)]
    code = demo.main([*TINY, *options, prose])
    printed = capsys.readouterr()
    assert code == 0
    losses = _losses(tmp_path)
    ours, theirs = losses["cute_attention"], losses["PyTorch's attention"]
    assert len(ours) == 60
    assert abs(ours[0] - torch.tensor(256.0).log().item()) < 0.3  # knows nothing yet
    assert ours[-1] < ours[0] / 2
    assert max(abs(a - b) for a, b in zip(ours[:10], theirs[:10], strict=True)) < 1e-4
    image = matplotlib.image.imread(tmp_path / "loss.png")
    assert image.shape[:2] == (840, 1120)
    assert image[..., :3].std() > 0.05  # not blank
    sample = printed.out.split("-" * 80)[1].strip("\n")
    assert sample.startswith("the ")
    assert 150 <= len(sample) <= 204
    assert sample.count("the ") > 5  # learnt from the text
    for name in ("cute_attention", "PyTorch, blockwise", "PyTorch, unfused"):
        (line,) = [line for line in printed.out.splitlines() if line.startswith(f"| {name} |")]
        assert float(line.split("|")[2]) > 0
    for words in ("tokens per second", "forward  ran on: reference", "not on: sm80, because"):
        assert words in printed.out
    assert printed.out.count("PASS") == 2
    assert "60/60" in printed.err  # the progress bar


def test_same_seed_same_curve(demo, prose, tmp_path):
    curves = []
    for seed in ("1", "1", "2"):
        options = ["--steps", "4", "--seed", seed, "--sample-bytes", "0", "--output", str(tmp_path)]
        assert demo.main([*TINY, *options, prose]) == 1  # four steps do not halve the loss
        curves.append(_losses(tmp_path)["cute_attention"])
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_comparison_fails_where_attention_differs(demo, prose, tmp_path, capsys, monkeypatch):
    """A scale 2.5 times too small is enough to leave the tolerance."""
    monkeypatch.setattr(demo, "attention", functools.partial(attention, scale=0.1))  # not 16**-0.5
    options = ["--compare", "--sample-bytes", "0", "--output", str(tmp_path)]
    assert demo.main([*TINY, *options, prose]) == 1
    printed = capsys.readouterr().out
    assert "PASS: in 60 steps" in printed
    assert "FAIL: from the same seed" in printed


def test_step_times_are_medians_of_turns(demo, prose, monkeypatch):
    """With a clock that the attentions advance: each has its own time, and one that PyTorch refuses
    has a reason."""
    from gpt import step_time
    from gpt.model import Shape
    from gpt.text import load_text

    clock = [0.0]
    calls: list[str] = []

    def attend(q, k, v, name, seconds):
        clock[0] += seconds
        calls.append(name)
        return attention(q, k, v, causal=True)

    def refused(q, k, v):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(step_time.time, "perf_counter", lambda: clock[0])
    attentions = {
        "ours": functools.partial(attend, name="ours", seconds=0.1),
        "slow": functools.partial(attend, name="slow", seconds=0.15),
        "refused": refused,
        "quick": functools.partial(attend, name="quick", seconds=0.05),
    }
    options = demo.build_parser().parse_args(TINY)
    shape, recipe = demo.settle(options)
    assert shape == Shape(1, 2, 1, 16, 32)
    times = step_time.measure(attentions, shape, load_text([Path(prose)], 32), recipe)
    assert [entry.name for entry in times] == list(attentions)
    assert times[2].reason == "No available kernel. Aborting execution."
    measured = [entry.seconds for entry in times if entry.rounds]
    assert measured == pytest.approx([0.1, 0.15, 0.05])
    assert step_time.best(times[1:]).name == "quick"
    # Three steps to warm up, one to choose the number of steps, five turns of two steps.
    assert [calls.count(name) for name in ("ours", "slow", "quick")] == [14, 14, 14]
    assert step_time.table(times).splitlines()[2:] == [
        "| quick | 50.00 | 0.500 |",
        "| ours | 100.00 | 1.000 |",
        "| slow | 150.00 | 1.500 |",
        "not measured: refused: No available kernel. Aborting execution.",
    ]


@pytest.mark.parametrize("length", [20, 50], ids=["within context", "beyond context"])
@pytest.mark.parametrize("position", ["rotary", "alibi", "t5"])
def test_cache_gives_the_logits_of_a_full_pass(length, position):
    """After more tokens than the context has, one layer with a cache computes a sliding window over
    the last tokens."""
    from gpt.model import GPT, Shape

    torch.manual_seed(0)
    shape = Shape(1, heads=4, heads_kv=2, head_dim=16, context=32, position=position, sink=True)
    window = functools.partial(attention, causal=True, window=(shape.context - 1, None))
    model = GPT(shape, functools.partial(attention, causal=True))
    torch.nn.init.normal_(model.blocks[0].attention.sink)
    full = GPT(shape, window)
    full.load_state_dict(model.state_dict())
    tokens = torch.randint(256, (2, length))
    caches = model.new_caches()
    pieces = [model(tokens[:, :7], caches)]
    pieces += [model(tokens[:, i : i + 1], caches, i) for i in range(7, length)]
    torch.testing.assert_close(torch.cat(pieces, 1), full(tokens), atol=1e-5, rtol=1e-5)


def test_model_sees_no_future():
    from gpt.model import GPT, Shape

    torch.manual_seed(0)
    shape = Shape(layers=2, heads=4, heads_kv=2, head_dim=16, context=16)
    model = GPT(shape, functools.partial(attention, causal=True))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] ^= 1
    apart = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert apart[:9].max() == 0
    assert apart[9:].min() > 0


def test_own_text_is_the_checkout_and_splits_each_file():
    from gpt.text import load_text, own_files

    files = own_files()
    names = {path.name for path in files}
    assert {"README.md", "api.py", "train_gpt.py", "forward.def"} <= names
    text = load_text([], 128)
    sizes = [path.stat().st_size for path in files]
    assert text.held_out.numel() == sum(size // 10 for size in sizes)
    assert text.train.numel() == sum(sizes) - text.held_out.numel()


WRONG = {
    "missing file": (["nowhere.txt"], "cannot read nowhere.txt: No such file or directory"),
    "folder": (["."], "cannot read .: Is a directory"),
    "short text": (["SHORT"], "5 bytes of text are too few"),
    "kv heads": (["--heads", "4", "--heads-kv", "3"], "--heads-kv 3 does not divide --heads 4"),
    "odd head dim": (["--head-dim", "7"], "--head-dim 7 is odd"),
    "no steps": (["--steps", "0"], "argument --steps: '0' is not a positive whole number"),
    "no number": (["--batch", "many"], "argument --batch: 'many' is not a positive whole number"),
    "learning rate": (["--learning-rate", "nan"], "'nan' is not a positive, finite number"),
    "position": (["--position", "sinusoidal"], "argument --position: invalid choice: 'sinusoidal'"),
    "dropout": (["--dropout", "1"], "argument --dropout: '1' is not a number from 0 to below 1"),
    "no share": (["--dropout", "half"], "argument --dropout: 'half' is not a number from 0"),
    "sinks compared": (["--compare", "--sink"], "PyTorch's attention has no sink"),
    "device": (["--device", "toaster"], "--device toaster: expected cpu, cuda or cuda:N"),
    "other device": (["--device", "meta"], "--device meta: expected cpu, cuda or cuda:N"),
    "GPU that is not there": (["--device", "cuda:99"], "--device cuda:99: PyTorch sees"),
    "backend": (["--backend", "sm70"], "argument --backend: invalid choice: 'sm70'"),
    "backend that cannot": (["--device", "cpu", "--backend", "sm80"], "sm80"),
    "no prompt": (["--prompt", ""], "--prompt is empty"),
    "output": (["--output", "SHORT"], "File exists"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(demo, tmp_path, capsys, options, message):
    short = tmp_path / "short.txt"
    short.write_text("short")
    options = [str(short) if option == "SHORT" else option for option in options]
    with pytest.raises(SystemExit) as caught:
        demo.main(["--output", str(tmp_path / "out"), *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
