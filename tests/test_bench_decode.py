"""`bench decode`: its grid, contenders and peers that are not here, its verdict and its plot."""

from __future__ import annotations

import json
import shlex
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention import attention
from cute_attention.bench import decode
from cute_attention.bench.contenders import OURS, PEER
from cute_attention.bench.decode_report import print_decode
from cute_attention.bench.inputs import make_inputs
from cute_attention.bench.points import Point
from cute_attention.bench.results import Row
from cute_attention.bench.tables import make_console
from cute_attention.cli.bench import main
from cute_attention.inference import attention_with_cache
from tolerances import assert_close

CPU = torch.device("cpu")
TINY = "--layouts 4/2x8,2/1x16 --batches 1x64,3x33,2x40 --dtype fp32 --device cpu"
FAST = "--rounds 2 --time-ms 1 --contenders reference,flash"


def test_the_grid() -> None:
    points = decode.grid(decode.LAYOUTS, decode.BATCHES, "bf16")
    assert len({point.key() for point in points}) == 5 * 7
    assert {point.seqlen_q for point in points} == {1}
    first = decode.point_of("32/8x128", "8x8192", "bf16")
    assert first == Point(8, 32, 1, 128, heads_kv=8, seqlen_k=8192, label="32/8x128")
    assert decode.bytes_read(first) == 8 * 8192 * 8 * 256 * 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = f"--json {tmp_path}/d.json --plot {tmp_path}/d.png"
    assert main(shlex.split(f"decode {TINY} {FAST} {files}")) == 0
    printed = capsys.readouterr().out
    assert "decoding: TB/s of K and V" in printed
    assert "no verdict: no peer was measured, or no kernel of ours" in printed
    rows = json.loads((tmp_path / "d.json").read_text())["rows"]
    assert len(rows) == 2 * 3 * 2
    for row in rows:
        read = row["batch"] * row["seqlen_k"] * row["heads_kv"] * 2 * row["head_dim"] * 4
        assert row["tbytes_s"] == pytest.approx(read / row["time_ms"] / 1e9)
    again = shlex.split(rows[0]["command"])
    assert again[:5] == ["python", "-m", "cute_attention", "bench", "decode"]
    assert main([*again[4:], "--rounds", "1", "--time-ms", "1"]) == 0
    assert (tmp_path / "d.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "d.png").stat().st_size > 10_000


def test_a_machine_without_a_gpu_says_what_it_skips(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--layouts 2/1x8 --batches 1x16 --device cpu --rounds 1 --time-ms 1"
    assert main(shlex.split(f"decode {shape}")) == 0
    assert "not measured: fa3, flashinfer: needs an NVIDIA GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--layouts 32x128", "--layouts has '32x128', expected HEADS/HEADS_KVxHEAD_DIM"),
        ("--batches 8", "--batches has '8', expected BATCHxKEYS"),
        ("--contenders xformers", "no contender of decode is named 'xformers'"),
        ("--direction bwd", "--direction of decode is fwd"),
        ("--layouts 3/2x8", "multiple of"),
    ],
)
def test_mistakes(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"decode --device cpu {text}")) == 2
    assert message in capsys.readouterr().err


class FakeFlashInfer:
    """The wrapper as FlashInfer documents it, computed by our function."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, **dtypes: Any,
    ) -> None:  # fmt: skip
        assert dtypes == {"q_data_type": torch.float32, "kv_data_type": torch.float32}
        width = int(indptr[1])
        self.table = indices.view(-1, width)
        self.lengths = (width - 1) * page_size + last_page_len

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = attention_with_cache(q[:, None], *pages, self.lengths.int(), block_table=self.table)
        return out[:, 0]


def fake_flash_attn_3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None, causal: bool, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    assert causal and num_splits == 0
    return attention_with_cache(q, k, v, cache_seqlens, block_table=page_table)


@pytest.mark.parametrize("page_size", [0, 16, 24])
def test_every_contender_computes_the_same(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers' modules are replaced by fakes with their interfaces; pages are in any order and
    the last one is not full."""
    monkeypatch.setattr(decode.FlashInfer, "workspace", 16)
    modules = {
        "flashinfer": types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeFlashInfer),
        "fa3": types.SimpleNamespace(flash_attn_with_kvcache=fake_flash_attn_3),
    }
    point = decode.point_of("8/2x16", "3x75", "fp32")
    inputs = make_inputs(point, CPU, seed=0)
    wanted = attention(*inputs.detached)
    for contender in decode.select("reference,auto,flashinfer,fa3,flash", page_size, CPU):
        if contender.name in modules:
            module = modules[contender.name]
            monkeypatch.setattr(contender, "_package", lambda module=module: module)
        out = contender.build(point, inputs)(*inputs.detached)
        assert_close(out, wanted, "rounding", name=contender.name)


def row(contender: str, role: str, tflops: float, keys: int) -> Row:
    point = Point(1, 4, 1, 8, heads_kv=2, seqlen_k=keys, label="4/2x8")
    metrics = {"time_ms": 1 / tflops, "tflops": tflops, "tbytes_s": tflops}
    return Row(point, contender, role, "fwd", metrics=metrics)


@pytest.mark.parametrize(
    ("speeds", "passed", "words"),
    [
        ((1.3, 1.2), True, "PASS: ours over the fastest peer at 2 points: geometric mean 1.25"),
        ((2.0, 0.9), False, "least 0.90 (wanted 1.0), behind at 1"),
        ((1.1, 1.1), False, "geometric mean 1.10 (wanted 1.2)"),
    ],
)
def test_the_verdict(
    speeds: tuple[float, float], passed: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best of ours against the best peer of each point; the reference does not count."""
    rows = []
    for keys, speed in zip((64, 128), speeds, strict=True):
        rows += [row("sm90", OURS, speed, keys), row("sm80", OURS, speed / 2, keys)]
        rows += [row("reference", OURS, 0.01, keys)]
        rows += [row("fa3", PEER, 1.0, keys), row("flash", PEER, 0.5, keys)]
    assert print_decode(make_console(), rows) is passed
    assert words in " ".join(capsys.readouterr().out.split())
