"""show, diff and explain tell the truth, and counters of a GPU are read and compared."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest

from cute_attention.cli.layouts import main
from cute_attention.layouts import diff, launch, ncu
from cute_attention.layouts.export import Request, edited, find_row
from cute_attention.layouts.model import Kernel, kernels
from cute_attention.layouts.path import Element, words
from cute_attention.layouts.show import show

pytestmark = pytest.mark.xdist_group("layouts")


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return kernels([Request(find_row("sm80_fwd_bf16_d64"))])[0]


def test_the_way_of_an_element_is_that_of_the_ptx_isa(kernel):
    told = words(kernel, Element("q", 5, 40))
    # 8 vectors a row, neighbouring threads along it: row 5, vector 5.
    assert "thread 45 copies it in its cp.async number 0, element 0 of 8" in told
    # Row 5 of 128 bytes, vector 5 ^ 5 = 0.
    assert "byte 640 of sQ" in told and "bank 0" in told
    # m16n8k16, operand A: column 8 of k block 2 is value 4, row 5 lane 20.
    assert "thread 20 holds it as operand A, m = 5, k = 40: value 4" in told
    # The accumulator's row 5, column 40: block 5 of 8 columns, lane 20, register 0.
    assert "out[b, m_block * 128 + 5, h, 40]" in told


@pytest.mark.parametrize(
    ("row", "tensor", "expected"),
    [
        ("sm80_fwd_bf16_d64", "o", ["O[5, 40] is summed in thread 20", "out[b, m_block * 128 + 5"]),
        ("sm80_bwd_bf16_d64", "q", ["operand B, n = 5, k = 40", "dQ[5, 40]", "dq[b, m_block * 32"]),
        (
            "sm80_bwd_bf16_d64",
            "k",
            ["operand A, m = 5, k = 40", "dK[5, 40]", "dk[b, n_block * 128"],
        ),
        ("sm80_bwd_bf16_d64", "v", ["dP^T = V dO^T: thread 20", "dv[b, n_block * 128 + 5, h_kv"]),
        ("sm80_bwd_bf16_d64", "do", ["grad_out[b, m_block * 32 + 5", "dV += P^T dO: thread"]),
        ("sm80_bwd_bf16_d64", "ds", ["dP[5, 31] is summed in", "dQ = dS K: thread"]),
        ("sm90_fwd_bf16_d128", "q", ["TMA box 0 of 4", "through its descriptor", "out[b, m_block"]),
        ("sm90_fwd_bf16_d128", "v", ["TMA box 0 of 2", "O += P V: operand B, n = 40, k = 5"]),
        (
            "sm90_bwd_bf16_d128",
            "q",
            [
                "TMA box 0 of 2 (64 x 64)",
                "dK += dS^T Q: operand B, n = 40, k = 5",
                "dQ[5, 40] is summed in thread 20, register 20",
                # Register 20 is the first of vector 5, which follows 5 x 128 vectors of 16 bytes.
                f"writes it to byte {16 * (5 * 128 + 20)} of sGRAD_Q, in its vector number 5",
            ],
        ),
        # The accumulator's row 5, column 31: lane 23 and register 13. stmatrix number 1 takes
        # registers 8 to 15, and those from 12 on are of matrix 2: lane 16 + 5 gives its row 5.
        (
            "sm90_bwd_bf16_d128",
            "ds",
            [
                "dP[5, 31] is summed in thread 23, register 13",
                "stmatrix.x4 number 1 of warp 0: lane 21 gives the address",
                "dQ = dS K: operand A, m = 31, k = 5",
            ],
        ),
    ],
)
def test_explain_follows_tensors_of_every_family(row, tensor, expected, capsys):
    col = "31" if tensor == "ds" else "40"
    assert main(["explain", row, "--tensor", tensor, "--row", "5", "--col", col]) == 0
    told = capsys.readouterr().out
    assert [text for text in expected if text not in told] == []


def test_elements_outside_a_tile_are_refused(capsys):
    assert main(["explain", "sm80_fwd_bf16_d64", "--row", "128"]) == 2
    assert "element (128, 0) is outside the 128 x 64 tile of q" in capsys.readouterr().err
    assert main(["explain", "sm80_fwd_bf16_d64", "--tensor", "x"]) == 2
    assert "--tensor x, expected one of ['q', 'k', 'v', 'o']" in capsys.readouterr().err


def test_diff_counts_what_a_larger_tile_changes(kernel):
    (larger,) = kernels([Request(edited(kernel.row, ["tile_n=128"]))])
    old, new = diff.metrics(kernel), diff.metrics(larger)
    assert (old["buffer k, bytes"], new["buffer k, bytes"]) == ("8192", "16384")
    assert (old["S = Q K^T"], new["S = Q K^T"]) == ("256 mma.m16n8k16", "512 mma.m16n8k16")
    assert "tile (queries x keys)" in diff.numbers(kernel, larger)
    assert diff.numbers(kernel, kernel).endswith("the layouts are the same")


def test_the_page_is_self_contained_and_its_script_runs(kernel, tmp_path):
    files = show(kernel, tmp_path)
    names = {file.suffix for file in files}
    assert names == {".svg", ".png", ".html"}
    assert len({file.name for file in files}) == len(files)
    page = files[-1].read_text()
    assert not re.search(r"(src|href)=\"(?!#|data:)", page)
    identifiers = re.findall(r" id=\"([^\"]+)\"", page)
    assert len(set(identifiers)) == len(identifiers)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["tiles"]["k"]["addresses"][1][:2] == [144, 128]
    assert data["tiles"]["k"]["paths"][5][5][0].startswith("k[b, n_block * 64 + 5")
    if shutil.which("node"):
        script = tmp_path / "page.js"
        script.write_text(re.search(r"<script>\n(.*?)</script>", page, re.DOTALL)[1])
        subprocess.run(["node", "--check", script], check=True)


def _csv(counts: dict[str, int], name: str) -> str:
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for short, metric in ncu.METRICS.items():
        mangled = f"_ZN4cute6kernelINS_4rows{len(name)}{name}EEEvv"
        lines.append(f'"0","{mangled}","{metric}","","{counts[short]:,}"')
        lines.append(f'"1","_Z5otherv","{metric}","","7"')
    return "\n".join(["==PROF== Connected", *lines])


def test_counters_are_read_and_compared(kernel):
    expected = ncu.predicted(kernel)
    # 2 heads x 4 tiles of queries, each 8 x (32 + 64 + 64) ldmatrix.
    assert expected["ldmatrix"] == 2 * 4 * 8 * (32 + 64 + 64)
    assert expected["ldmatrix conflicts"] == expected["WGMMA wavefronts"] == 0
    counted = ncu.parse(_csv(expected, kernel.name), [kernel.name])
    assert counted == {kernel.name: expected}
    assert ncu.table({kernel.name: kernel}, counted).agrees
    conflicts = expected | {"ldmatrix conflicts": 10_000}
    counted = ncu.parse(_csv(conflicts, kernel.name), [kernel.name])
    compared = ncu.table({kernel.name: kernel}, counted)
    assert not compared.agrees
    assert "0 / 10000" in compared.text
    # A kernel of the same name as often as ncu lists it: the backward has three.
    twice = _csv(expected, kernel.name) + "\n" + _csv(expected, kernel.name).split("\n", 2)[2]
    counted = ncu.parse(twice, [kernel.name])
    assert counted == {kernel.name: {name: 2 * count for name, count in expected.items()}}
    assert not ncu.table({kernel.name: kernel}, counted).agrees


def test_counters_of_a_backward_row_are_those_of_an_h200():
    """Measured: docs/layouts.md."""
    (kernel,) = kernels([Request(find_row("sm80_bwd_bf16_d128"))])
    assert ncu.predicted(kernel) == {
        "ldmatrix": 69632,
        "ldmatrix conflicts": 0,
        "ldmatrix wavefronts": 278528,
        "load wavefronts": 17408,
        "store wavefronts": 25600,
        "WGMMA wavefronts": 0,
    }


@pytest.mark.parametrize(
    ("served_by", "processes"),
    [
        ({}, 1),
        # Two rows that others of their key would serve share a process without those.
        ({"sm80_bwd_bf16_d96_99kb": "bwd_bf16_d96", "sm80_bwd_bf16_d128_99kb": "bwd_bf16_d128"}, 2),
        # Two that would serve each other's calls are parted.
        ({"sm80_bwd_bf16_d128_99kb": "bwd", "sm80_bwd_bf16_d128": "99kb"}, 4),
        ({"sm80_fwd_bf16_d64": "."}, 1),  # no kernel for this GPU
    ],
)
def test_each_row_is_launched_where_it_is_chosen(served_by, processes, monkeypatch):
    names = ["sm80_bwd_bf16_d96", "sm80_bwd_bf16_d96_99kb", "sm80_bwd_bf16_d128"]
    names += ["sm80_bwd_bf16_d128_99kb", "sm80_fwd_bf16_d64"]
    launched, started = [], []

    def is_chosen(row):
        present = [n for n in names if re.search(os.environ.get("CUTE_ATTENTION_ROWS", ""), n)]
        rival = served_by.get(row.name)
        others = [n for n in present if n != row.name]
        if rival == ".":
            return None
        return rival is None or not any(re.search(rival, n) for n in others)

    def run(command, env, check):
        monkeypatch.setenv("CUTE_ATTENTION_ROWS", env["CUTE_ATTENTION_ROWS"])
        process(command[3:])

    def process(names):
        started.append(names)
        launch.main(names)

    monkeypatch.delenv("CUTE_ATTENTION_ROWS", raising=False)
    monkeypatch.setattr(launch, "is_chosen", is_chosen)
    monkeypatch.setattr(launch, "launch", lambda row: launched.append(row.name))
    monkeypatch.setattr(launch.subprocess, "run", run)
    process(names)
    unserved = [name for name, rival in served_by.items() if rival == "."]
    assert sorted(launched + unserved) == sorted(names)
    assert len(started) == processes


def test_counters_of_an_sm90_row_are_those_of_an_h200():
    """Measured: docs/layouts.md. Loads and stores are the tiles that the producer announces."""
    (kernel,) = kernels([Request(find_row("sm90_fwd_bf16_d128"))])
    expected = ncu.predicted(kernel)
    assert expected == dict.fromkeys(expected, 0) | {"WGMMA wavefronts": 81920}
    counted = dict.fromkeys(expected, 0.0) | {"load wavefronts": 1608.0, "WGMMA wavefronts": 81920}
    assert ncu.table({kernel.name: kernel}, {kernel.name: counted}).agrees
    counted["WGMMA wavefronts"] += 1
    assert not ncu.table({kernel.name: kernel}, {kernel.name: counted}).agrees


def test_wgmma_counts_of_an_sm90_backward_row():
    """A product that is one step late runs once more than there are tiles of queries."""
    (kernel,) = kernels([Request(find_row("sm90_bwd_bf16_d128"))])
    scores = 2 * (256 + 256)  # of S^T and dP^T: 128 x 128 of A, 64 x 128 of B for each warpgroup
    gradients = 2 * 256  # of dV and dK: 64 x 128 of B for each warpgroup
    queries = 2 * 256  # of dQ: 64 x 128 of A and of B for each warpgroup
    expected = 2 * 8 * (4 * (scores + gradients) + 5 * queries)
    assert ncu.predicted(kernel)["WGMMA wavefronts"] == expected
