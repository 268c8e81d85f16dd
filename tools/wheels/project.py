"""What pyproject.toml and CMake say that the wheels need."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; scikit-build-core brings it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "manylinux_2_28_x86_64"
# The chips of each family's wheel; sm80's also has PTX, for chips that are newer than all of them.
RELEASE_ARCHS = {"sm80": "80;86;89;90", "sm90": "90a"}


def metadata() -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def check_machine(machine: str) -> None:
    """Stop where no wheel can be built for a release."""
    if machine != "x86_64":
        raise SystemExit(
            f"wheels: this machine is {machine}, expected x86_64: kernels and wheel tag are tested "
            "there alone, so no other wheel is made. `pip install .` builds for this machine."
        )


def run(*command: str | Path, **options: Any) -> None:
    """Run a command, shown first; stop where it fails."""
    print("+", *command, flush=True)
    if code := subprocess.run([str(word) for word in command], **options).returncode:
        raise SystemExit(code)


def script(name: str) -> str:
    """A program that was installed beside this Python."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def build_kernels(build: Path, cache: dict[str, str], families: list[str], jobs: int) -> None:
    """Compile the kernel libraries of `families` in `build`, for old systems.

    `cache` is what CMake is told; a folder that was configured before keeps the rest.
    """
    defines = cache | {"CUTE_ATTENTION_MANYLINUX": "ON", "CUTE_ATTENTION_TORCH": "OFF"}
    defines |= {"Python_EXECUTABLE": sys.executable, "CMAKE_MAKE_PROGRAM": script("ninja")}
    words = [f"-D{name}={value}" for name, value in defines.items()]
    run(script("cmake"), "-G", "Ninja", "-S", ROOT, "-B", build, *words)
    targets = [f"cute_attention_{family}" for family in families]
    run(script("cmake"), "--build", build, "--parallel", str(jobs), "--target", *targets)


def licenses() -> dict[str, bytes]:
    """The licences that go with compiled kernels: this project's, and that of the CuTe headers."""
    found = {"LICENSE": (ROOT / "LICENSE").read_bytes()}
    for file in importlib.metadata.files("nvidia-cutlass") or ():
        if file.name.startswith("LICENSE"):
            found["LICENSE.cutlass"] = Path(str(file.locate())).read_bytes()
            break
    return found
