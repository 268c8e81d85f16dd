"""The distributions of kernels: how their wheels are made, found, and refused. No nvcc."""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

from cute_attention.dispatch import backends
from cute_attention.native import core, packages
from cute_attention.problem import Problem
from test_dispatch import VERSION, ask, build

ROOT = Path(__file__).resolve().parents[1]
LICENSES = {"LICENSE": b"ours", "LICENSE.cutlass": b"theirs"}

needs_core = pytest.mark.skipif(not core.available(), reason="the core library is not installed")


@pytest.fixture(scope="module")
def tools():
    """Imports a module of tools/wheels."""
    sys.path.insert(0, str(ROOT / "tools" / "wheels"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "tools" / "wheels"))


@pytest.fixture(scope="module")
def project(tools):
    return tools("project").metadata()


def test_versions_are_tied_together(project):
    version, extras = project["version"], project["optional-dependencies"]
    for family in packages.FAMILIES:
        assert extras[family] == [f"cute-attention-{family}=={version}"]
    assert extras["all"] == [f"cute-attention[{','.join(packages.FAMILIES)}]"]


def test_the_wheels_are_those_of_the_families(tools, project):
    assert tuple(tools("project").RELEASE_ARCHS) == packages.FAMILIES
    assert tuple(tools("kernel_wheel").CHIPS) == packages.FAMILIES


def write_wheel(tools, project, library: Path, folder: Path, **changes: str) -> Path:
    write = tools("kernel_wheel").write_kernel_wheel
    return write(library, "sm80", project | changes, LICENSES, folder)


def test_kernel_wheel_has_the_library_and_no_code(tools, project, tmp_path):
    library = tmp_path / "any.so"
    library.write_bytes(b"\x7fELF kernels")
    path = write_wheel(tools, project, library, tmp_path / "one")
    info = f"cute_attention_sm80-{project['version']}.dist-info"
    assert path.name == f"cute_attention_sm80-{project['version']}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert files.pop("cute_attention_sm80/libcute_attention_sm80.so") == library.read_bytes()
    assert set(files) == {
        f"{info}/{name}"
        for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE", "licenses/LICENSE.cutlass")
    }
    metadata = Parser().parsestr(files[f"{info}/METADATA"].decode())
    assert metadata["Name"] == "cute-attention-sm80"
    assert metadata["Version"] == project["version"]
    assert metadata.get_all("Requires-Dist") == [f"cute-attention=={project['version']}"]
    assert metadata.get_all("License-File") == list(LICENSES)
    assert b"Root-Is-Purelib: false" in files[f"{info}/WHEEL"]
    again = write_wheel(tools, project, library, tmp_path / "two")
    assert again.read_bytes() == path.read_bytes()


def test_record_has_the_digest_of_every_file(tools, project, tmp_path):
    library = tmp_path / "any.so"
    library.write_bytes(bytes(range(256)))
    with zipfile.ZipFile(write_wheel(tools, project, library, tmp_path)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in files if name.endswith("/RECORD"))
    lines = [line.rsplit(",", 2) for line in files[record].decode().splitlines()]
    assert {name for name, _, _ in lines} == set(files)
    for name, digest, size in lines:
        if name == record:
            assert (digest, size) == ("", "")
            continue
        sha = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={sha}", len(files[name]))


@pytest.fixture
def site(tools, project, tmp_path) -> Path:
    """A folder with the installed kernel wheel of a made-up library."""
    library = build(tmp_path / "build", "sm80")
    with zipfile.ZipFile(write_wheel(tools, project, library, tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path / "site"


@needs_core
def test_installed_kernels_are_found_without_an_import(site):
    found = """
answer = [
    [library.path for library in libraries()],
    [name for name in sys.modules if name.startswith("cute_attention_sm")],
    [row.name for row in kernels()],
]"""
    paths, modules, rows = ask(found, PYTHONPATH=str(site))
    assert str(site / "cute_attention_sm80" / "libcute_attention_sm80.so") in paths
    assert modules == []
    assert "fake_sm80_d128" in rows
    assert "fake_sm80_d128" not in ask(found)[2]


@needs_core
def test_named_folders_come_before_installed_kernels(site, tmp_path):
    other = build(tmp_path / "named")
    paths = ask(
        "answer = [entry.path for entry in libraries()]", other.parent, PYTHONPATH=str(site)
    )
    installed = site / "cute_attention_sm80" / "libcute_attention_sm80.so"
    assert paths.index(str(other)) < paths.index(str(installed))


@needs_core
def test_a_folder_cannot_be_added_too_late(tmp_path):
    code = f"""
def add(folder):
    failed = core().cute_attention_add_kernel_folder(folder)
    return core().cute_attention_last_error().decode() if failed else ""
before = add(b"{tmp_path}")
libraries()
answer = [before, add(b"{tmp_path}"), add(b"/elsewhere")]"""
    first, again, late = ask(code)
    assert (first, again) == ("", "")
    assert late == "folder is /elsewhere, expected before the kernel libraries are loaded"


@needs_core
@pytest.mark.parametrize(
    ("name", "macros", "message"),
    [
        (
            "sm80",
            {"FAKE_VERSION": '"0.0.1"'},
            f"it is of version 0.0.1, this core of version {VERSION}",
        ),
        ("sm90", {"FAKE_ABI": 12345}, "it has kernel ABI 12345, this core has "),
    ],
)
def test_other_kernels_are_refused_with_what_mends_them(tmp_path, name, macros, message):
    path = build(tmp_path, name, **macros)
    errors, rows = ask(
        "answer = [{l.path: l.error for l in libraries()}, [r.name for r in kernels()]]", tmp_path
    )
    assert errors[str(path)].startswith(message)
    assert errors[str(path)].endswith(
        f': pip install "cute-attention[{name}]=={VERSION}", or rebuild it'
    )
    assert not [row for row in rows if row.startswith("fake")]


@needs_core
def test_a_library_of_no_distribution_is_to_be_rebuilt(tmp_path):
    path = build(tmp_path, "mine", FAKE_VERSION='"0.0.1"')
    errors = ask("answer = {l.path: l.error for l in libraries()}", tmp_path)
    assert errors[str(path)].endswith(": rebuild it")


@pytest.mark.parametrize(
    ("capability", "families"),
    [(75, ()), (80, ("sm80",)), (89, ("sm80",)), (90, ("sm90", "sm80")), (120, ("sm80",))],
)
def test_families_for_a_gpu(capability, families):
    assert packages.families_for(capability) == families


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), {"sm90", "sm80"}), ((8, 6), {"sm80"}), ((7, 5), set())],
)
def test_missing_kernels_name_their_install_on_a_gpu_that_needs_them(
    monkeypatch, capability, expected
):
    monkeypatch.setattr(core, "available", lambda: True)
    monkeypatch.setattr(core, "explain", lambda problem, device: [])
    monkeypatch.setattr(core, "libraries", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    told = set()
    for report in backends.survey(Problem(device=torch.device("cuda", 0)))[:-1]:
        (reason,) = report.reasons
        assert reason.startswith(f"no {report.backend} kernel is loaded")
        if match := re.search(r': pip install "cute-attention\[(\w+)\](==[\d.]+)?"$', reason):
            assert match[1] == report.backend
            told.add(match[1])
    assert told == expected


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le"])
def test_other_machines_are_refused(tools, machine):
    with pytest.raises(SystemExit, match=f"this machine is {machine}, expected x86_64"):
        tools("project").check_machine(machine)
    tools("project").check_machine("x86_64")


def test_hub_repository_has_the_package_with_its_libraries(tools, project, tmp_path):
    library = tmp_path / "any.so"
    library.write_bytes(b"kernels")
    version = project["version"]
    wheel = write_wheel(tools, project, library, tmp_path / "dist")
    with zipfile.ZipFile(tmp_path / "dist" / f"cute_attention-{version}-any.whl", "w") as archive:
        archive.writestr("cute_attention/__init__.py", "x = 1")
        archive.writestr("cute_attention/lib/libcute_attention.so", "core")
        archive.writestr(f"cute_attention-{version}.dist-info/METADATA", "")
    hub = tools("hub").write_repository(wheel.parent, tmp_path / "hub")
    files = {
        path.relative_to(hub / "build").as_posix()
        for path in (hub / "build").rglob("*")
        if path.is_file()
    }
    stem = "torch-stable-abi210-{}-x86_64-linux/{}".format
    common = ("__init__.py", "lib/libcute_attention.so", "metadata.json")
    expected = {stem(variant, name) for variant in ("cpu", "cu130") for name in common}
    assert files == expected | {stem("cu130", "lib/libcute_attention_sm80.so")}


def test_hub_repository_loads_with_the_kernels_package(tools, tmp_path):
    pytest.importorskip("kernels")
    if not list((ROOT / "dist").glob("cute_attention-*.whl")):
        pytest.skip("dist/ has no wheel: make wheels")
    hub = tools("hub").write_repository(ROOT / "dist", tmp_path / "hub")
    program = (
        "import sys, torch, pathlib, kernels\n"
        "ours = kernels.get_local_kernel(pathlib.Path(sys.argv[1]), backend='cpu')\n"
        "q = torch.randn(2, 9, 4, 16)\n"
        "print((ours.attention(q, q, q) - ours.attention_reference(q, q, q)).abs().max().item())\n"
    )
    command = [sys.executable, "-c", program, hub]
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH="")
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5
