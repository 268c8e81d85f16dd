"""show, diff and explain tell the truth, and counters of a GPU are read and compared."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from cute_attention.cli.layouts import main
from cute_attention.layouts import commands, counters, diff, launch, ncu
from cute_attention.layouts.export import Request, edited, find_row
from cute_attention.layouts.model import Kernel, kernels
from cute_attention.layouts.path import Element, words
from cute_attention.layouts.pictures import sketches
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


def test_explain_follows_an_element_through_both_kernels_of_a_row(capsys):
    arguments = ["explain", "sm90_bwd_bf16_d192x128", "--row", "5", "--col", "40"]
    assert main([*arguments, "--tensor", "q"]) == 0
    grad_kv, grad_q = capsys.readouterr().out.split("sm90_bwd_bf16_d192x128/grad_q: ")
    assert grad_kv.startswith("sm90_bwd_bf16_d192x128/grad_kv: q tile, row 5, column 40\n")
    # A step of the one has 64 queries, a CTA of the other 128.
    assert "q[b, m_block * 64 + 5" in grad_kv and "q[b, m_block * 128 + 5" in grad_q
    assert "S^T = K Q^T: operand B, n = 5, k = 40" in grad_kv
    assert "dK += dS^T Q: operand B, n = 40, k = 5" in grad_kv and "dq[" not in grad_kv
    assert "S = Q K^T: operand A, m = 5, k = 40" in grad_q
    assert "dQ[5, 40] is summed in thread 20, register 20" in grad_q
    assert "registers -> global: exchanged among the 4 threads" in grad_q and "fp32" not in grad_q
    arguments[1] += "/grad_kv"
    assert main([*arguments, "--tensor", "v"]) == 0
    told = capsys.readouterr().out
    assert "dV[5, 40] is summed in" in told and "grad_q" not in told


def test_a_command_takes_a_row_or_one_of_its_kernels(capsys, monkeypatch, tmp_path):
    shown = []

    def show(kernel, folder):
        shown.append(kernel.file_name)
        return [folder / kernel.file_name]

    monkeypatch.setattr(commands.show, "show", show)
    row = "sm90_bwd_bf16_d192x128"
    assert main(["show", row, "--out", str(tmp_path)]) == 0
    assert main(["show", f"{row}/grad_q", "--out", str(tmp_path)]) == 0
    assert shown == [f"{row}_grad_kv", f"{row}_grad_q", f"{row}_grad_q"]
    assert main(["check", row, f"{row}/grad_q"]) == 0
    told = capsys.readouterr().out
    assert told.count(f"{row}/grad_kv: ") == 1 and told.count(f"{row}/grad_q: ") == 2
    assert "1 rows, " in told
    assert main(["export", row]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"grad_kv", "grad_q"}
    assert main(["export", f"{row}/grad_q"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"plan", "roles", "copies", "products"}
    assert main(["diff", f"{row}/grad_kv", f"{row}/grad_q"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"tile \(queries x keys\) +64 x 64 +128 x 64", told)
    assert main(["diff", row, "sm90_bwd_bf16_d128"]) == 2
    named = f"compare kernel with kernel; named are {row}/grad_kv and {row}/grad_q with sm90_bwd"
    assert named in capsys.readouterr().err
    assert main(["check", f"{row}/grad_k"]) == 2
    assert f"{row} has the kernels grad_kv, grad_q" in capsys.readouterr().err
    assert main(["check", "sm80_fwd_bf16_d64/main"]) == 2
    assert "sm80_fwd_bf16_d64 has only one kernel" in capsys.readouterr().err


def test_every_kernel_of_a_row_is_drawn_in_files_of_its_own():
    drawn = kernels([Request(find_row("sm90_bwd_bf16_d192x128"))])
    names = [[sketch.name for sketch in sketches(kernel)] for kernel in drawn]
    for each in names:
        assert len(set(each)) == len(each)
        assert {"plan", "product_S"} <= set(each)
    assert "product_dK" in names[0] and "product_dQ" in names[1]
    assert len({kernel.file_name for kernel in drawn}) == 2


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
    for short, metric in counters.METRICS.items():
        mangled = f"_ZN4cute6kernelINS_4rows{len(name)}{name}EEEvv"
        lines.append(f'"0","{mangled}","{metric}","","{counts[short]:,}"')
        lines.append(f'"1","_Z5otherv","{metric}","","7"')
    return "\n".join(["==PROF== Connected", *lines])


def test_counters_are_read_and_compared(kernel):
    expected = ncu.predicted(kernel)
    # 2 heads x 4 tiles of queries, each 8 x (32 + 64 + 64) ldmatrix.
    assert expected["ldmatrix"] == 2 * 4 * 8 * (32 + 64 + 64)
    assert expected["ldmatrix conflicts"] == expected["WGMMA wavefronts"] == 0
    counted = counters.parse(_csv(expected, kernel.name), [kernel.name])
    assert counted == {kernel.name: expected}
    assert ncu.table({kernel.name: kernel}, counted).agrees
    conflicts = expected | {"ldmatrix conflicts": 10_000}
    counted = counters.parse(_csv(conflicts, kernel.name), [kernel.name])
    compared = ncu.table({kernel.name: kernel}, counted)
    assert not compared.agrees
    assert "0 / 10000" in compared.text
    # A kernel of the same name as often as ncu lists it: the backward has three.
    twice = _csv(expected, kernel.name) + "\n" + _csv(expected, kernel.name).split("\n", 2)[2]
    counted = counters.parse(twice, [kernel.name])
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


def test_counters_of_a_row_with_two_kernels_are_those_of_each_kernel(monkeypatch):
    """The call has 512 queries and 512 keys: 8 x 8 tiles of 64 x 64 for one kernel, 4 x 8 of 128 x
    64 for the other."""
    grad_kv, grad_q = kernels([Request(find_row("sm90_bwd_bf16_d256"))])
    block = 64 * 256 * 2 // 128  # wavefronts of an operand of a product: of Q, K, V or dO
    expected = {
        grad_kv.name: 2 * 8 * 8 * 6 * block,  # S and dP read two, dV and dK one
        grad_q.name: 2 * 4 * 8 * 2 * 5 * block,  # each warpgroup: S and dP two, dQ one
    }
    predicted = {kernel.name: ncu.predicted(kernel) for kernel in (grad_kv, grad_q)}
    assert {name: each["WGMMA wavefronts"] for name, each in predicted.items()} == expected

    row, metric = grad_kv.row.name, counters.METRICS["WGMMA wavefronts"]
    of_grad_kv = expected[grad_kv.name]
    counted = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    # As Nsight Compute prints them, and mangled.
    counted.append(f'"0","void grad_kv<{row}>(BackwardArguments)","{metric}","","{of_grad_kv}"')
    mangled = f"_ZN4cute4sm906grad_qINS_4rows{len(row)}{row}EEEvv"
    counted.append(f'"0","{mangled}","{metric}","","{expected[grad_q.name]}"')
    for other in (
        f"_ZN4cute4sm9020prepare_without_sumsI{len(row)}{row}E",
        f"void grad_kv_sum<{row}>",
    ):
        counted.append(f'"0","{other}","{metric}","","3"')
    measured = counters.parse("\n".join(counted), list(expected))
    assert {name: each["WGMMA wavefronts"] for name, each in measured.items()} == expected
    launched = []

    def run(command, **_):
        launched.extend(command[command.index("cute_attention.layouts.launch") + 1 :])
        return subprocess.CompletedProcess(command, 0, "\n".join(counted), "")

    monkeypatch.setattr(counters, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(counters.subprocess, "run", run)
    assert counters.measure(list(expected)) == measured
    assert launched == [row]  # once for both


def test_of_two_that_ask_for_the_same_layouts_one_compiles(monkeypatch, tmp_path):
    from cute_attention.layouts import export

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = Request(find_row("sm80_fwd_bf16_d64"))
    compiled = []

    def build(requests: Sequence[Request]) -> str:
        compiled.extend(requests)
        time.sleep(0.3)  # the other one asks meanwhile
        export._cached(request).write_text('[{"tile": 1}]')
        return ""

    monkeypatch.setattr(export, "_build", build)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(export.export, [[request], [request]]))
    assert found == [[[{"tile": 1}]]] * 2
    assert compiled == [request]
