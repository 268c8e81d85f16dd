"""Nsight Compute on the kernels of `bench steps`: its command and its output, of a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention.bench import kernel_folder, optimisation_lab
from cute_attention.bench.optimisations import STEPS
from cute_attention.layouts import counters
from cute_attention.layouts.errors import LayoutError

LDMATRIX = (counters.METRICS["ldmatrix"], counters.METRICS["ldmatrix conflicts"])


def counted_of(number: float) -> dict[str, float]:
    """The figures where Nsight Compute says this number of everything, and 7 MMAs more, of which
    four warps count each WGMMA."""
    names = ("ldmatrix", "conflicts", "instructions")
    return {f"counted_{name}": number for name in names} | {"counted_mma": number / 4 + 7}


def test_counters_are_those_of_each_kernel(monkeypatch):
    kernels = {
        step.row.name: SimpleNamespace(name=f"{step.row.name}_01234567") for step in STEPS[4:6]
    }
    said = ['"Kernel Name","Metric Name","Metric Value"', "==PROF== something"]
    for number, kernel in enumerate(kernels.values(), 1):
        function = (
            f"_ZN4sm807forwardINS_4rows{len(kernel.name)}{kernel.name}EEEvNS_13ForwardParamsE"
        )
        for metric in (*LDMATRIX, counters.INSTRUCTIONS, counters.WGMMA):
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
        counted_of(1000.0),
        counted_of(2000.0),
    ]

    said[:] = [line for line in said if not ("2,007" in line and counters.MMA in line)]
    found, missing = optimisation_lab.counted(kernels, [Path("a.so"), Path("b.so")])
    assert [*found.values()][1] == {
        name: value for name, value in counted_of(2000.0).items() if name != "counted_mma"
    }
    assert missing == f"Nsight Compute has not told all counters of {[*kernels][1]}"

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
from cute_attention.bench import kernel_folder, optimisation_lab
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

    told = "Nsight Compute has not told all counters of a row"
    assert counted() == f"({{'a row': {{'counted_instructions': 1234.0}}}}, '{told}')\n"
    words = (tmp_path / "words").read_text().split()
    assert words[-3:] == ["-m", "cute_attention.bench.optimisation_lab", "a.so"]
    (tmp_path / "refused").touch()
    assert "does not have permission to access counters" in counted()


class Cpu(TorchFunctionMode):
    """Tensors for "cuda" are on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if kwargs else {})})


def test_every_library_is_launched_once(monkeypatch):
    """Also one that this process has loaded before, as a plug-in."""
    launched = []
    monkeypatch.setattr(kernel_folder, "load_file", lambda path: path.stem)
    monkeypatch.setattr(
        optimisation_lab, "attention", lambda q, k, v, kernel: launched.append((kernel, q.shape))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with Cpu():
        optimisation_lab.main(["a.so", "b.so"])
    assert launched == [("a", (1, 512, 2, 128)), ("b", (1, 512, 2, 128))]
