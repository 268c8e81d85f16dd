"""Charts and tables of result files: `bench plot`, and the tools that write the documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")
pytest.importorskip("matplotlib", reason="the benchmark's extra is not installed")

from matplotlib import image

from cute_attention.bench.contenders import OURS, PEER
from cute_attention.bench.flops import flops
from cute_attention.bench.machine import describe
from cute_attention.bench.points import Point
from cute_attention.bench.results import Row, write_json
from cute_attention.bench.sets import named_set
from cute_attention.bench.tables import make_console, print_speed
from cute_attention.cli.bench import main

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def row(point: Point, what: str, contender: str, tflops: float) -> Row:
    role = OURS if contender in ("auto", "sm90", "sm80") else PEER
    time_ms = flops(point, what) / tflops / 1e9
    return Row(point, contender, role, what, metrics={"tflops": tflops, "time_ms": time_ms})


def figures(set_name: str) -> list[Row]:
    """Forward and backward of a set: ours is 1.25 times as fast as fa3, and 0.8 times at the last
    point; cudnn is slower than both."""
    rows = []
    points = named_set(set_name)
    for point in points:
        for what, unit in (("fwd", 500.0), ("bwd", 400.0)):
            ratio = 0.8 if point == points[-1] else 1.25
            rows += [
                row(point, what, "auto", ratio * unit),
                row(point, what, "fa3", unit),
                row(point, what, "cudnn", 0.5 * unit),
            ]
    return rows


def write(path: Path, rows: list[Row], kind: str = "speed") -> Path:
    write_json(path, kind, replace(describe(torch.device("cpu")), device="Some GPU"), rows)
    return path


@pytest.mark.parametrize("set_name", ["paper", "models", "varlen"])
def test_plot_draws_a_result_file(tmp_path: Path, set_name: str) -> None:
    """Lines, marks for many named points, bars for few; each with ours in red and peers in blue."""
    results, plot = write(tmp_path / "r.json", figures(set_name)), tmp_path / "deep" / "r.png"
    assert main(["plot", str(results), "--output", str(plot)]) == 0
    pixels = image.imread(plot)[..., :3]
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    assert ((red > 0.6) & (green < 0.3) & (blue < 0.4)).sum() > 200
    assert ((red < 0.3) & (green < 0.6) & (blue > 0.6)).sum() > 200
    assert plot.stat().st_size < 150_000
    only = tmp_path / "only.png"
    arguments = ["--direction", "fwd", "--contenders", "auto,cudnn"]
    assert main(["plot", str(results), "--output", str(only), *arguments]) == 0
    pixels = image.imread(only)[..., :3]
    blue = (pixels[..., 0] < 0.3) & (pixels[..., 1] < 0.6) & (pixels[..., 2] > 0.6)
    assert blue.sum() == 0


def test_plot_names_its_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = write(tmp_path / "r.json", figures("varlen"))
    memory = write(tmp_path / "m.json", figures("varlen"), kind="memory")
    out = ["--output", str(tmp_path / "r.png")]
    assert main(["plot", str(results), *out, "--direction", "fwdbwd"]) == 2
    assert "has no figure of what was asked for" in capsys.readouterr().err
    assert main(["plot", str(memory), *out]) == 2
    assert (
        "is a file of memory, expected one of these: speed, steps, experiments"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "r.png").exists()


def test_points_behind_the_best_peer_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    print_speed(make_console(), figures("models"))
    text = capsys.readouterr().out
    assert text.count("29 of 30") == 2
    behind = text.split("points behind the best peer")[1]
    lines = [line for line in behind.splitlines() if "0.80x" in line]
    assert len(lines) == 2
    assert all("batch 1, 2k" in line and "FlashAttention-3" in line for line in lines)
    assert "GPT-2" not in behind


def test_chart_of_the_readme(tmp_path: Path) -> None:
    import readme_chart
    import readme_section

    rows = figures("paper")
    noise = [
        row(rows[0].point, "fwd", "sm80", 9000.0),  # another one of ours
        row(named_set("varlen")[0], "fwd", "auto", 9000.0),  # another set
        row(rows[0].point, "fwdbwd", "auto", 9000.0),  # another direction
    ]
    kept = readme_chart.chosen([*rows, *noise], "auto")
    assert kept == rows
    text = readme_chart.caption(kept, {"device": "Some GPU", "torch": "2.11.0"})
    assert text.startswith("![TFLOP/s of cute-attention and its peers on Some GPU](docs/images/")
    assert "forward 1.23 (ahead at 35 of 36), backward 1.23 (ahead at 35 of 36)" in text
    assert "beside FlashAttention-3, cuDNN (SDPA), all taking turns" in text
    with pytest.raises(ValueError, match=r"has 35 of the 36 points .* for auto, backward"):
        readme_chart.chosen([*rows[:-3], *rows[-2:]], "auto")

    readme = tmp_path / "README.md"
    other = "b\n<!-- other: x -->\n<!-- end -->"
    readme.write_text(f"a\n<!-- chart: how -->\nold\n<!-- end -->\n{other}")
    readme_section.replace("chart", text, readme)
    assert readme.read_text() == f"a\n<!-- chart: how -->\n{text}<!-- end -->\n{other}"
    with pytest.raises(SystemExit, match="0 sections 'graph'"):
        readme_section.replace("graph", text, readme)
    assert (TOOLS.parent / "README.md").read_text().count("<!-- chart: ") == 1


def test_tables_of_the_docs() -> None:
    import performance_table

    text = performance_table.tables(figures("paper"), None)
    assert "| pass | head dim | mask | seqlen | auto | fa3 | cudnn | ours / best peer |" in text
    assert "| bwd | 64 | full | 512 | 500 | 400 | 200 | 1.25 |" in text
    assert text.count("Geometric mean 1.23, ahead at 35 of 36, worst 0.80.") == 2
    assert "worst 1.60" in performance_table.tables(figures("paper"), "cudnn")
    text = performance_table.tables(figures("models"), None)
    point = named_set("models")[0]
    ours, peer = (flops(point, "bwd") / tflops / 1e6 for tflops in (500, 400))
    line = f"| ViT-B/16 224 | {ours:.0f} | {peer:.0f} (FlashAttention-3) | 1.25 |"
    assert line in text.split("| backward |")[1]
