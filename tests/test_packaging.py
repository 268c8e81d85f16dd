"""The wheel, built and installed as a user would, and a C++ program compiled against it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from cute_attention.native import instance, rows

ROOT = Path(__file__).resolve().parents[1]
CMAKE = shutil.which("cmake", path=sysconfig.get_path("scripts"))
COMPILE = ("c++", "-std=c++17", "-shared", "-fPIC")

pytestmark = [
    pytest.mark.xdist_group("packaging"),  # the wheel is built once
    pytest.mark.skipif(CMAKE is None, reason="cmake is not installed with this Python"),
]


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        command, env=dict(os.environ, **environment), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    options = (
        "--no-build-isolation",
        "--no-deps",
        "--config-settings",
        f"build-dir={folder}/build",
    )
    run(*pip, "wheel", *options, "--wheel-dir", folder, ROOT, CUTE_ATTENTION_ARCHS="")
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """The folder of the installed package, which is also its CMake prefix."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent / "site")
    return wheel.parent / "site" / "cute_attention"


def test_one_wheel_serves_every_python(wheel):
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("cute_attention", "py3", "none")
    assert platform.startswith("linux_")
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()


def test_wheel_has_what_it_should_and_no_more(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = "cute_attention"
    expected = {path.relative_to(ROOT / "python").as_posix() for path in sources("python", "*.py")}
    expected |= {f"{package}/{path}" for path in map(str, relative("include", "*.h"))}
    expected |= {f"{package}/kernels/{path.name}" for path in sources("src/kernels", "*.def")}
    expected |= {f"{package}/src/layouts/{path.name}" for path in sources("src/layouts", "*.h")}
    expected |= {f"{package}/src/{name}" for name in instance.SOURCES}
    expected |= {f"{package}/src/json.h", f"{package}/py.typed", f"{package}/layouts/page.html"}
    expected |= {f"{package}/lib/libcute_attention{part}.so" for part in ("", "_torch")}
    assert expected <= names
    metadata = {name for name in names if ".dist-info/" in name}
    cmake = {name for name in names if name.startswith(f"{package}/lib/cmake/")}
    assert cmake >= {f"{package}/lib/cmake/{package}/{package}Config.cmake"}
    assert any(name.endswith("LICENSE") for name in metadata)
    assert names - expected - metadata - cmake == set()


def sources(folder: str, pattern: str) -> list[Path]:
    return sorted((ROOT / folder).rglob(pattern))


def relative(folder: str, pattern: str) -> list[Path]:
    return [path.relative_to(ROOT) for path in sources(folder, pattern)]


def test_installed_package_imports_and_lists_its_tables(wheel, installed, tmp_path):
    program = (
        "from cute_attention.native import core, rows\n"
        "print(core.library_folder())\n"
        "print(core.build_info()['version'], len(rows.table()))"
    )
    folder, line = run_installed(installed, tmp_path, "-c", program).splitlines()
    assert Path(folder) == installed / "lib"
    assert line == f"{wheel.stem.split('-')[1]} {len(rows.table())}"


def run_installed(installed: Path, folder: Path, *arguments: str) -> str:
    """What Python prints with the installed package, in `folder`."""
    # -S and a path of its own: neither the editable install nor the sources are in the way.
    paths = [installed.parent, sysconfig.get_path("purelib")]
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CUTE_ATTENTION_KERNEL_PATH": "",
        "XDG_CACHE_HOME": str(folder),
    }
    command = (sys.executable, "-S", *arguments)
    result = subprocess.run(
        command, env=dict(os.environ, **environment), cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_layout_lab_runs_from_the_installed_package(installed, tmp_path):
    lab = ("-m", "cute_attention.layouts")
    checked = run_installed(installed, tmp_path, *lab, "check", "sm80_fwd_bf16_d64")
    assert checked.splitlines()[-1].startswith("1 rows, ")
    assert checked.rstrip().endswith(", 0 violated")
    told = run_installed(installed, tmp_path, *lab, "explain", "sm80_fwd_bf16_d64")
    assert "1. q[b, m_block * 128 + 0, h, 0]" in told
    assert list((tmp_path / "cute-attention" / "layouts").glob("*.json"))


def test_cpp_example_compiles_against_the_installed_package(wheel, installed, tmp_path):
    build = tmp_path / "build"
    source = ROOT / "examples" / "cpp"
    run(CMAKE, "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={installed}")
    run(CMAKE, "--build", build)
    fake = ROOT / "tests" / "cpp" / "fake_kernel_library.cpp"
    plugin = tmp_path / "libcute_attention_fake.so"
    version = f'-DCUTE_ATTENTION_VERSION="{wheel.stem.split("-")[1]}"'
    run(*COMPILE, version, f"-I{installed}/include", fake, "-o", plugin)

    output = run(build / "list_kernels", CUTE_ATTENTION_KERNEL_PATH=str(tmp_path))
    libraries, kernels = map(json.loads, output.splitlines())
    assert [(library["name"], library["error"]) for library in libraries] == [("fake", "")]
    assert "fake_sm90_d64" in [kernel["name"] for kernel in kernels]


@pytest.mark.parametrize(
    ("archs", "message"),
    [("75", '"75" is neither a chip from 80 on nor 90a'), ("80x", '"80x" is neither')],
)
def test_wrong_architectures_are_refused(tmp_path, archs, message):
    script = tmp_path / "archs.cmake"
    include = f'include("{ROOT}/cmake/architectures.cmake")\n'
    script.write_text(include + f'cute_attention_read_archs("{archs}" families)\n')
    result = subprocess.run([CMAKE, "-P", script], capture_output=True, text=True)
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("archs", "families", "forward", "backward"),
    [
        ("80;90a", "sm80;sm90", "80,code=[compute_80,sm_80]", "80,code=[compute_80,sm_80]"),
        ("90;90a", "sm80;sm90", "90,code=[compute_90,sm_90]", "90,code=[compute_90,sm_90]"),
        (
            "120;86;80", "sm80",
            "80,code=[compute_80,sm_86,sm_80,sm_120]",
            "80,code=[compute_80,sm_86,sm_80] 90,code=[sm_120]",
        ),
        ("90a", "sm90", "", ""),
    ],
)  # fmt: skip
def test_architectures_select_families_and_targets(tmp_path, archs, families, forward, backward):
    script = tmp_path / "archs.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/architectures.cmake")\n'
        f'cute_attention_read_archs("{archs}" families)\n'
        'message(NOTICE "${families}")\n'
        'message(NOTICE "${families_sm80_forward_FLAGS}")\n'
        'message(NOTICE "${families_sm80_backward_FLAGS}")\n'
        'message(NOTICE "${families_sm90_forward_FLAGS}${families_sm90_backward_FLAGS}")\n'
    )
    result = subprocess.run([CMAKE, "-P", script], check=True, capture_output=True, text=True)
    read, *found, sm90 = result.stderr.splitlines()
    assert read == families
    assert sm90 == 2 * ("-gencode=arch=compute_90a,code=sm_90a" if "sm90" in families else "")
    for flags, expected in zip(found, (forward, backward), strict=True):
        assert flags.replace("-gencode=arch=compute_", "").replace(";", " ") == expected
