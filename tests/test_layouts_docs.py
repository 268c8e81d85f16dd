"""Every command of docs/changing_a_layout.md runs, and ends with the exit code that it says: those
for a GPU in a test of their own. The commands are taken from the page.

Those that compile with nvcc take minutes and are part of `make audit`. On a machine with a GPU and
without nvcc, CUTE_ATTENTION_DOCS_KERNELS names a folder with what they have written elsewhere, for
instance slow/kernels/*.so and build/lab/lib/*.so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_attention.native import core

pytestmark = pytest.mark.xdist_group("layouts")

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```sh(?: exit=(\d))?(?: needs=(\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (int(exit_code or 0), needs, commands)
    for exit_code, needs, commands in BLOCK.findall(
        (ROOT / "docs" / "changing_a_layout.md").read_text()
    )
]


BUILT = os.environ.get("CUTE_ATTENTION_DOCS_KERNELS")


def _has(needs: str) -> bool:
    if needs == "ncu":
        return torch.cuda.is_available() and shutil.which("ncu") is not None
    if needs == "nvcc":  # a minute: part of `make audit`, which builds kernels anyway
        return "CUTE_ATTENTION_BUILD" in os.environ and shutil.which("nvcc") is not None
    return not needs


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project that the commands may change, and their order with it. It has the core
    of the package that is tested, and its kernels."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("include", "src", "python", "tests", "cmake", "third_party", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "lib")
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
    if library := core.library_folder():
        (folder / "python" / "cute_attention" / "lib").symlink_to(library.resolve())
    return folder


def _run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    }
    environment["CUTE_ATTENTION_CACHE"] = str(folder / "cache")
    environment["PYTHONPATH"] = str(folder / "python")
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )


def _ends_as_said(command: str, folder: Path, exit_code: int) -> str:
    """What a command printed."""
    result = _run(command, folder)
    output = result.stdout + result.stderr
    assert result.returncode == exit_code, f"{command}\n{output}"
    return output


def test_the_page_has_commands():
    assert len(BLOCKS) >= 10
    assert {exit_code for exit_code, _, _ in BLOCKS} == {0, 1, 2}
    assert {needs for _, needs, _ in BLOCKS} == {"", "nvcc", "gpu", "ncu"}


def test_five_commands_lead_from_an_edited_layout_to_a_measured_kernel():
    page = (ROOT / "docs" / "changing_a_layout.md").read_text()
    section = page.split("\n## ")[5]
    assert section.startswith("5. Run it") and "there are five commands" in section
    commands = "".join(match[3] for match in BLOCK.finditer(section)).splitlines()
    assert len(commands) == 5
    assert "bench speed" in commands[-1]


@pytest.mark.gpu
def test_the_commands_for_a_gpu_end_as_the_page_says(checkout):
    """Without the layout lab's commands, which the other test runs."""
    if not BUILT and shutil.which("nvcc") is None:
        pytest.skip("no nvcc, and CUTE_ATTENTION_DOCS_KERNELS names no folder")
    said = []
    for exit_code, needs, commands in BLOCKS:
        if needs == "nvcc" and BUILT:
            shutil.copytree(BUILT, checkout, dirs_exist_ok=True)
            continue
        for command in commands.splitlines():
            if needs in ("gpu", "nvcc") or command.startswith(("cp ", "sed ")):
                output = _ends_as_said(command, checkout, exit_code)
                if needs == "gpu":
                    said.append(output)
    slow, tests, _, _, compared = said
    assert "TFLOP/s" in slow
    assert re.search(r"\d+ passed", tests) and "sm80_fwd_bf16_d64_n128 is not built" not in tests
    for name in ("old", "new"):
        (row,) = json.loads((checkout / f"{name}.json").read_text())["rows"]
        assert (row["contender"], row["reason"]) == ("sm80", "") and row["tflops"] > 0
    assert "sm80" in compared


def test_every_command_ends_as_the_page_says(checkout):
    said = {}
    for exit_code, needs, commands in BLOCKS:
        if not _has(needs):
            continue
        for command in commands.splitlines():
            said[command, exit_code] = _ends_as_said(command, checkout, exit_code)
    broken = next(output for (_, exit_code), output in said.items() if exit_code == 1)
    violated = [line.split()[1] for line in broken.splitlines() if "VIOLATED " in line]
    assert set(violated) == {"banks"}
    assert "at worst 2-way" in broken
    assert (checkout / "pictures" / "sm80_fwd_bf16_d64.html").stat().st_size > 100_000
