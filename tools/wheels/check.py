"""Installs wheels into a fresh environment as a user would, without a GPU, and tries them there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kernel_wheel import write_kernel_wheel
from project import ROOT, build_kernels, licenses, metadata, run
from release import build_core, build_kernel_wheel, report

FAMILY = "sm80"
# Without what would lead Python or the core to another package.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name != "PYTHONPATH" and not name.startswith("CUTE_ATTENTION_")
}
OLD_VERSION = "0.0.1"

# Imports the package, computes with it, and says which libraries it has found.
PROGRAM = """
import json, sys, torch, cute_attention
from cute_attention.native import core
q, k, v = torch.randn(3, 2, 33, 4, 64, dtype=torch.float64).requires_grad_().unbind()
out = cute_attention.attention(q, k, v, causal=True)
expected = cute_attention.attention_reference(q, k, v, causal=True)
out_grad, expected_grad = (torch.autograd.grad(o.square().sum(), q)[0] for o in (out, expected))
error = max((out - expected).abs().max().item(), (out_grad - expected_grad).abs().max().item())
imported = [name for name in sys.modules if name.startswith("cute_attention_sm")]
libraries = [[library.path, library.rows, library.error] for library in core.libraries()]
print(json.dumps([error, imported, libraries]))
"""


def check_install(kernels: Path, torch: str, folder: Path) -> None:
    """Build wheels from the rows compiled in `kernels`, install them, and try them.

    Args:
        kernels: a build folder of CMake with sm80 rows. It is linked anew, not compiled anew.
        torch: the requirement to install beside them.
        folder: where wheels and the environment are made.
    """
    shutil.rmtree(folder, ignore_errors=True)
    build_kernels(kernels, {}, [FAMILY], jobs=1)
    wheels = [build_core(folder / "wheels"), build_kernel_wheel(kernels, FAMILY, folder / "wheels")]
    report(wheels)

    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, torch, "numpy")
    name, version = metadata()["name"], metadata()["version"]
    run(*pip, "--no-index", "--find-links", folder / "wheels", f"{name}[{FAMILY}]=={version}")

    library = next((folder / "venv").rglob(f"libcute_attention_{FAMILY}.so"))
    error, imported, libraries = _ask(python, folder)
    print(f"error {error:.1e}, kernels imported as modules: {imported}, libraries: {libraries}")
    expect(error < 1e-12, f"attention is {error} off the formula")
    expect(imported == [], f"{imported} was imported")
    ((path, rows, refused),) = libraries
    expect(Path(path).samefile(library), f"the kernel library is {path}, expected {library}")
    expect(rows > 0 and refused == "", f"{rows} rows, error '{refused}'")

    text = _info(folder)
    print(text)
    expect(f"cute_attention {version}, " in text, "info does not name the version")
    expect(str(library) in text, "info does not name the kernel library")
    expect(f'no sm90 kernels: pip install "{name}[sm90]=={version}"' in text, "no remedy for sm90")

    _check_wrong_versions(folder, pip, library, f'pip install "{name}[{FAMILY}]=={version}"')
    print("check-wheels: passed")


def _check_wrong_versions(folder: Path, pip: tuple, library: Path, remedy: str) -> None:
    """A kernel wheel of another version: pip refuses it, and where it is there, the core does."""
    old = metadata() | {"version": OLD_VERSION}
    wheel = write_kernel_wheel(library, FAMILY, old, licenses(), folder / "old")
    refused = subprocess.run([*pip, "--no-index", wheel], capture_output=True, text=True)
    expect(refused.returncode != 0, "pip installed kernels of another version")
    expect(f"cute-attention=={OLD_VERSION}" in refused.stderr, refused.stderr)

    source = ROOT / "tests" / "cpp" / "fake_kernel_library.cpp"
    version = f'-DFAKE_VERSION="{OLD_VERSION}"'
    library.unlink()
    run(
        "c++", "-std=c++17", "-shared", "-fPIC", version, f"-I{ROOT}/include", source, "-o", library
    )
    text = _info(folder)
    print(*(line for line in text.splitlines() if OLD_VERSION in line))
    expect(f"it is of version {OLD_VERSION}, this core of version" in text, "info accepts it")
    expect(remedy in text, f"info does not say {remedy}")


def _ask(python: Path, folder: Path) -> list:
    command = [python, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def _info(folder: Path) -> str:
    """What the console script says."""
    command = [folder / "venv" / "bin" / "cute-attention", "info"]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def expect(true: bool, otherwise: str) -> None:
    """Stop unless something holds."""
    if not true:
        raise SystemExit(f"check-wheels: {otherwise}")
