"""`tune` without a GPU: compiled candidates are tried and measured, by stand-ins for kernels and
clocks.

Each test has a process of its own, as in test_tune.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from built_rows import calls
from cute_attention.native import core
from tuning import SHAPE, UNPROVEN, run, tune

pytestmark = pytest.mark.skipif(not core.available(), reason="the core library is not installed")

# Kernels that run on the CPU: the result is that of the reference, another for the tiles of LYING;
# and a clock that says of a tile what MS does, so that figures do not depend on the machine.
STAND_INS = """
import re, torch
from cute_attention import attention
from cute_attention.bench import speed
from cute_attention.bench.contenders import blocks
from cute_attention.timing import Plan
from cute_attention.tune import command, measure

MS = {}
tried, timed = [], []

class Clock:
    def plan(self, step):
        step()
        return Plan(1)

    def sample(self, step, plan):
        before = len(timed)
        step()
        tile = re.search(r'm\\d+n(\\d+)s', timed[-1][0])[1] if len(timed) > before else "of a peer"
        return [MS.get(f"n{tile}", 20.0)]

speed.make_timer = lambda device, time_ms: Clock()

def missing(self, device):
    return None

def build(self, point, inputs):
    name = self.kernel.name
    tile = f"n{self.kernel.tile_n}"
    def call(q, k, v):
        timed.append((name, point.seqlen_q))
        out = attention(q, k, v, backend="reference")
        return -out if tile in LYING else out
    return call

def trial(kernel, trusted, search, device):
    tried.append(kernel.name)
    assert trusted.tile_n == 64
    return "out is wrong" if f"n{kernel.tile_n}" in WRONG else ""

LYING, WRONG = set(), set()
blocks.BuiltKernel.missing, blocks.BuiltKernel.build = missing, build
command.trial_of = trial
CPU = torch.device("cpu")
torch.cuda.is_available = lambda: True
command.pick_device = lambda name: CPU
command.cannot_run_on = lambda device, arch: None

def tune(text):
    tried.clear(), timed.clear()
    return main(["tune", *text.split()])
"""


MEASURED = f"""
{UNPROVEN}{STAND_INS}
import contextlib, io, json, pathlib
OUT = pathlib.Path("tuned")
own = "--row tile_n=32 --row tile_n=96 --row tile_n=112 --row tile_n=48"
shape = {SHAPE!r}.replace("--candidates 2", "--candidates 4")
how = "--rounds 2 --time-ms 1 --peers flash,efficient"
search = f"{{shape}} {{own}} {{how}} --output {{OUT}}"

def said(text):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert tune(text) == 0
    return output.getvalue()
"""


def measured(folder: Path, code: str) -> None:
    done = run(folder, f"import os\nos.chdir({str(folder)!r})\n{MEASURED}{code}")
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]


def test_candidates_are_tried_and_measured_in_turn(tmp_path: Path) -> None:
    """One candidate is faster, one slower, one fails its trial, one lies at the points alone."""
    measured(
        tmp_path,
        """
MS |= {"n32": 5.0, "n96": 40.0, "n48": 1.0, "n112": 1.0}
WRONG.add("n112"), LYING.add("n48")
text = said(search)
assert "n32s1w4_o1 replaces sm80_fwd_fp16_d64" in text, text
for key in ("fp16_d64, Sm80, Float16", "bf16_d64, Sm80, BFloat16"):
    line = f"CUTE_ATTENTION_FORWARD(sm80_fwd_{key}, 64, 64, None, 128, 32, 1, 4, O1)"
    assert line in text, text
assert text.count("out is wrong") == 1, "the reason of the one that failed its trial"
assert "its result differs from that of" in text and "efficient: needs an NVIDIA GPU" in text
assert len(tried) == 4
names = {name for name, _ in timed}
assert not any("n112" in name for name in names), "a wrong one is timed"
results = json.loads(next(OUT.glob("results_*.json")).read_text())
rows = [row for row in results["rows"] if "to_present" in row]
assert {row["seqlen_q"] for row in rows} == {64, 96}
fast = [row["to_present"] for row in rows if "n32" in row["contender"]]
assert fast == [4.0, 4.0]
assert all("tune --arch sm80" in row["command"] for row in rows)
assert not [row for row in rows if "n48" in row["contender"]]

# Again: all is known, and nothing is tried or timed; the verdict stands.
again = said(search)
assert tried == timed == []
assert "n32s1w4_o1 replaces sm80_fwd_fp16_d64" in again
assert "replaces" in said(f"--measure-only --input {OUT} --plot plot.png")
assert tried == timed == [] and pathlib.Path("plot.png").stat().st_size > 5000
""",
    )


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    measured(
        tmp_path,
        """
MS |= {"n32": 5.0}
text = said(search)
(path,) = OUT.glob("results_*.json")
data = json.loads(path.read_text())
def is_lost(row):
    return row["seqlen_q"] == 96 and "n32" in row["contender"]
data["rows"] = [row for row in data["rows"] if not is_lost(row)]
path.write_text(json.dumps(data))
assert "replaces" in said(search)
assert {length for _, length in timed} == {96}
assert {("n32" in name, "n64" in name) for name, _ in timed} == {(True, False), (False, True)}

# No time is left: what is not measured is said, and is measured another time.
path.unlink()
text = said(f"{search} --minutes=1e-9")
assert "4 candidates are not measured at every point" in text and timed == []
assert "replaces" in said(search)
""",
    )


def test_measuring_needs_no_compiler_and_no_layout_lab(tmp_path: Path) -> None:
    """As on a machine that has neither: what is built elsewhere is tried, measured and judged, and
    the lines for the table are those of the machine that built."""
    own = "--row tile_n=32 --row tile_n=96"
    tune(tmp_path, f"{SHAPE} {own} --build-only --output {tmp_path / 'tuned'}")
    compiled = len(calls(tmp_path))
    measured(
        tmp_path,
        """
import sys
from cute_attention.native import build, toolchain

def asked(*words):
    raise AssertionError("measuring asked for a compiler")

toolchain.find = toolchain.program = toolchain.chips_here = build.build = asked
sys.modules["pycute"] = sys.modules["cutlass_library"] = None
MS |= {"n32": 5.0, "n96": 40.0}
text = said(f"--measure-only --input {OUT} --peers= --rounds 2 --time-ms 1")
assert "n32s1w4_o1 replaces sm80_fwd_fp16_d64" in text, text
for key in ("fp16_d64, Sm80, Float16", "bf16_d64, Sm80, BFloat16"):
    line = f"CUTE_ATTENTION_FORWARD(sm80_fwd_{key}, 64, 64, None, 128, 32, 1, 4, O1)"
    assert line in text, text
""",
    )
    assert len(calls(tmp_path)) == compiled


def test_two_folders_may_have_one_kernel(tmp_path: Path) -> None:
    """One process measures both: a library of the same kernel is not loaded twice."""
    measured(
        tmp_path,
        """
import shutil
MS |= {"n32": 5.0}
assert "replaces" in said(search)
shutil.copytree(OUT, "again", ignore=shutil.ignore_patterns("results_*", "trials_*"))
assert "n32s1w4_o1 replaces" in said("--measure-only --input again --peers= --rounds 2")
assert timed
""",
    )


def test_a_kernel_that_fails_while_it_is_timed_is_remembered(tmp_path: Path) -> None:
    """Whatever is timed after it fails too, and is not to blame."""
    measured(
        tmp_path,
        """
lost_gpu = []

class Breaks(Clock):
    def sample(self, step, plan):
        times = super().sample(step, plan)
        if lost_gpu or times == [13.0]:
            lost_gpu.append(True)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return times

def check_gpu(kernel, device, fault, lost):
    if lost_gpu:
        lost(kernel.name, fault)
        raise measure.GpuUnusable(f"after {kernel.name}")

measure.check_gpu = check_gpu
speed.make_timer = lambda device, time_ms: Breaks()
MS |= {"n32": 5.0, "n96": 13.0}
assert tune(search) == 1
assert not list(OUT.glob("results_*.json")), "no row of those that it has taken along"
lost_gpu.clear()
text = said(search)
assert "n32s1w4_o1 replaces sm80_fwd_fp16_d64" in text
assert "illegal memory access was encountered, at fp16 full 1x64" in text
assert not any("n96" in name for name, _ in timed)
""",
    )


def test_a_trial_that_does_not_end_is_not_repeated(tmp_path: Path) -> None:
    measured(
        tmp_path,
        """
def dies(kernel, trusted, search, device):
    if kernel.tile_n == 96:
        raise KeyboardInterrupt  # the user ends a process that hangs
    return trial(kernel, trusted, search, device)

command.trial_of = dies
try:
    said(search)
    raise SystemExit("it went on")
except KeyboardInterrupt:
    pass
command.trial_of = trial
text = said(search)
assert "its trial did not end" in text
assert not any("n96" in name for name in tried) and not any("n96" in name for name, _ in timed)
assert len(tried) == 2, "those after it"
""",
    )


def test_a_kernel_that_breaks_the_gpu_ends_the_run_and_is_remembered(tmp_path: Path) -> None:
    measured(
        tmp_path,
        """
broken = []
def check_gpu(kernel, device, fault, lost):
    if broken:
        lost(kernel.name, fault)
        raise measure.GpuUnusable(f"after {kernel.name}")
measure.check_gpu = check_gpu

def breaks(self, point, inputs):
    if self.kernel.tile_n == 96:
        broken.append(True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return build(self, point, inputs)
blocks.BuiltKernel.build = breaks
assert tune(search) == 1
broken.clear()
blocks.BuiltKernel.build = build
text = said(search)
assert "illegal memory access was encountered, at fp16 full 1x64" in text
assert not any("n96" in name for name, _ in timed)
""",
    )
