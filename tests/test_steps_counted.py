"""Nsight Compute on the kernels of `bench steps`: its command and its output, of a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention.bench import optimisation_lab
from cute_attention.bench.optimisations import STEPS
from cute_attention.layouts import counters
from cute_attention.layouts.errors import LayoutError


def test_counters_are_those_of_each_kernel(monkeypatch):
    kernels = {
        step.row.name: SimpleNamespace(name=f"{step.row.name}_01234567") for step in STEPS[4:6]
    }
    said = ['"Kernel Name","Metric Name","Metric Value"', "==PROF== something"]
    for number, kernel in enumerate(kernels.values(), 1):
        function = (
            f"_ZN4sm807forwardINS_4rows{len(kernel.name)}{kernel.name}EEEvNS_13ForwardParamsE"
        )
        for metric in (counters.METRICS["ldmatrix"], counters.INSTRUCTIONS, counters.WGMMA):
            said.append(f'"{function}","{metric}","{number},000"')
        said.append(f'"{function}","{counters.MMA}","{number},007"')

    def run(words):
        assert words[-2:] == ["a.so", "b.so"]
        assert words[words.index("-m") + 1] == "cute_attention.bench.optimisation_lab"
        metrics = words[words.index("--metrics") + 1].split(",")
        assert counters.INSTRUCTIONS in metrics and counters.MMA in metrics
        assert counters.WGMMA not in metrics  # which chips before 9.0 do not know
        return "\n".join(said)

    monkeypatch.setattr(counters, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(counters, "run", run)
    found, missing = optimisation_lab.counted(kernels, [Path("a.so"), Path("b.so")])
    assert missing == ""
    assert [*found.values()] == [
        {"counted_ldmatrix": 1000.0, "counted_instructions": 1000.0, "counted_mma": 1007 - 750.0},
        {"counted_ldmatrix": 2000.0, "counted_instructions": 2000.0, "counted_mma": 2007 - 1500.0},
    ]

    def absent():
        raise LayoutError("no ncu here")

    monkeypatch.setattr(counters, "find_ncu", absent)
    assert optimisation_lab.counted(kernels, []) == ({}, "no ncu here")


NCU = """#!/bin/sh
echo "$@" > {folder}/words
if [ -e {folder}/refused ]; then
    echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"
    exit 0
fi
echo "==PROF== Connected to process 1"
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","_ZN5sm807forwardIN4rows{length}{name}EEEvv","smsp__inst_executed.sum","inst","1,234"'
"""


def test_instructions_are_counted_where_there_is_no_layout_lab(tmp_path):
    """As on a machine that only measures: Nsight Compute is there, and may be refused the GPU's
    counters; what the lab needs is not."""
    name = f"{STEPS[0].row.name}_01234567"
    program = tmp_path / "ncu"
    program.write_text(NCU.format(folder=tmp_path, name=name, length=len(name)))
    program.chmod(0o755)
    code = f"""
import sys
from types import SimpleNamespace
sys.modules["pycute"] = None
from cute_attention.bench import optimisation_lab
print(optimisation_lab.counted({{"a row": SimpleNamespace(name={name!r})}}, ["a.so"]))
"""

    def counted() -> str:
        environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert counted() == "({'a row': {'counted_instructions': 1234.0}}, '')\n"
    words = (tmp_path / "words").read_text().split()
    assert words[-3:] == ["-m", "cute_attention.bench.optimisation_lab", "a.so"]
    (tmp_path / "refused").touch()
    assert "does not have permission to access counters" in counted()
