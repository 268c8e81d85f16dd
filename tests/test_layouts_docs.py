"""Every command of docs/changing_a_layout.md runs, and ends with the exit code that it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.xdist_group("layouts")

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```sh(?: exit=(\d))?(?: needs=(\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (int(exit_code or 0), needs, commands)
    for exit_code, needs, commands in BLOCK.findall(
        (ROOT / "docs" / "changing_a_layout.md").read_text()
    )
]


def _has(needs: str) -> bool:
    if needs == "gpu":
        return torch.cuda.is_available()
    if needs == "ncu":
        return torch.cuda.is_available() and shutil.which("ncu") is not None
    if needs == "nvcc":  # a minute: part of `make audit`, which builds kernels anyway
        return "CUTE_ATTENTION_BUILD" in os.environ and shutil.which("nvcc") is not None
    return not needs


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the project that the commands may change, and their order with it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("include", "src", "python", "tests", "cmake", "third_party", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    # An editable install finds its modules before PYTHONPATH does.
    (folder / "python" / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [\n"
        "    finder for finder in sys.meta_path"
        " if not type(finder).__module__.startswith('_editable_')\n"
        "]\n"
    )
    return folder


def _run(command: str, folder: Path, needs: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    }
    environment["CUTE_ATTENTION_CACHE"] = str(folder / "cache")
    if needs not in ("gpu", "nvcc"):  # only the installed package has a core, which loads kernels
        environment["PYTHONPATH"] = str(folder / "python")
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_page_has_commands():
    assert len(BLOCKS) >= 10
    assert {exit_code for exit_code, _, _ in BLOCKS} == {0, 1, 2}


def test_every_command_ends_as_the_page_says(checkout):
    said = {}
    for exit_code, needs, commands in BLOCKS:
        if not _has(needs):
            continue
        for command in commands.splitlines():
            result = _run(command, checkout, needs)
            output = result.stdout + result.stderr
            assert result.returncode == exit_code, f"{command}\n{output}"
            said[command, exit_code] = output
    broken = next(output for (_, exit_code), output in said.items() if exit_code == 1)
    violated = [line.split()[1] for line in broken.splitlines() if "VIOLATED " in line]
    assert set(violated) == {"banks"}
    assert "at worst 2-way" in broken
    assert (checkout / "pictures" / "sm80_fwd_bf16_d64.html").stat().st_size > 100_000
