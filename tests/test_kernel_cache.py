"""The life of a kernel that is built from Python, with a compiler that is none: one process builds,
nothing is left of a build that failed, and what others could have written is not loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from built_rows import ROW, SOURCE, calls, contents, install_fake, start
from cute_attention.cli import cache as cache_command
from cute_attention.errors import BuildError
from cute_attention.native import build, core, kernel_cache, toolchain
from fake_nvcc import BYTES

pytestmark = pytest.mark.skipif(not core.available(), reason="the core library is not installed")

NOBODY = 65534
SECONDS = 1.5  # that a slow compiler takes


@pytest.fixture
def fake(tmp_path, monkeypatch) -> dict[str, str]:
    environment = install_fake(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


def built(source: build.Source = SOURCE) -> Path:
    return build.build(source, is_study=True)[1]


def until(condition: Callable[[], object]) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen")


def running(group: int) -> list[int]:
    """The processes of a group but those that have ended and that nobody has asked for yet."""
    found = []
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, own_group = stat_file.read_text().rpartition(")")[2].split()[:3]
            if int(own_group) == group and state != "Z":
                found.append(int(stat_file.parent.name))
    return found


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_second_build_comes_from_the_cache(fake, tmp_path, capfd):
    path = built()
    assert re.fullmatch(rf"{ROW.name}_([0-9a-f]{{8}})-\1[0-9a-f]{{16}}\.so", path.name)
    assert path.read_bytes() == b"\0" * BYTES
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    assert built() == path
    assert len(calls(tmp_path)) == 1
    assert contents(tmp_path) == [path.name]
    said = capfd.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == ["building", "built"]
    assert all(path.name.split("-")[0] in line for line in said)


def test_what_is_used_last_is_remembered(fake):
    path = built()
    os.utime(path, (1000, 1000))
    built()
    assert path.stat().st_mtime == 1000
    assert time.time() - path.stat().st_atime < 100


@pytest.mark.parametrize("count", [2, 8])
def test_processes_build_once(fake, tmp_path, count):
    processes = [
        start(fake, FAKE_NVCC="slow", FAKE_NVCC_SECONDS=str(SECONDS)) for _ in range(count)
    ]
    answers = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * count, answers
    assert len({out for out, _ in answers}) == 1
    assert len(calls(tmp_path)) == 1
    assert contents(tmp_path) == [Path(answers[0][0].strip()).name]
    assert sum("waiting for another process" in err for _, err in answers) >= 1


def test_threads_build_once_and_different_rows_at_the_same_time(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_NVCC", "two")  # ends once two compilers run
    built_paths: list[Path] = []
    sources = [SOURCE, SOURCE, dataclasses.replace(SOURCE, chips=(86,))]
    threads = [
        threading.Thread(target=lambda source=source: built_paths.append(built(source)))
        for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(built_paths), len(set(built_paths))) == (3, 2)
    assert len(calls(tmp_path)) == 2


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fail", r"exit code 2\nrow.cu\(7\): error: static assertion failed: too large\nThe comm"),
        ("kill", r"was killed by SIGKILL, as happens where memory runs out"),
        ("nothing", r"reported success, but wrote no library"),
    ],
)
def test_a_compiler_that_fails_leaves_nothing(fake, tmp_path, monkeypatch, mode, message):
    monkeypatch.setenv("FAKE_NVCC", mode)
    with pytest.raises(BuildError, match=rf"^{ROW.name}_[0-9a-f]{{8}}: .*{message}"):
        built()
    assert contents(tmp_path) == []
    monkeypatch.setenv("FAKE_NVCC", "text")
    assert built().read_bytes() == b"\0" * BYTES


def test_when_the_builder_fails_those_who_wait_build(fake, tmp_path):
    slow = start(fake, FAKE_NVCC="slow", FAKE_NVCC_SECONDS="60")
    until(lambda: calls(tmp_path))
    waiting = start(fake)
    assert "waiting for another process" in (waiting.stderr.readline())
    slow.kill()
    out, _ = waiting.communicate()
    assert waiting.returncode == 0
    slow.communicate()
    # What the killed process left is removed by the next one that builds the same row.
    assert contents(tmp_path) == [Path(out.strip()).name]


def test_an_interrupted_build_ends_its_compiler(fake, tmp_path):
    process = start(fake, FAKE_NVCC="slow", FAKE_NVCC_SECONDS="60")
    until(lambda: calls(tmp_path))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(calls(tmp_path)[0][0]), 0)
    assert contents(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_builder_that_is_killed_takes_its_compiler_along(fake, tmp_path, number):
    """And what that has started, as nvcc starts others. Only another process can see to it."""
    process = start(fake, FAKE_NVCC="slow", FAKE_NVCC_SECONDS="60")
    until(lambda: calls(tmp_path))
    group = int(calls(tmp_path)[0][0])
    until(lambda: len(running(group)) == 2)
    process.send_signal(number)
    process.communicate(timeout=20)
    until(lambda: not running(group))


def test_nothing_watches_when_the_compiler_has_ended(fake, monkeypatch):
    begun: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recording(*args, **options):
        begun.append(popen(*args, **options))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", recording)
    built()
    assert [process.args[0] for process in begun][-2:] == [fake["CUDACXX"], "/bin/sh"]
    assert all(process.returncode is not None for process in begun)


def test_a_lock_that_nobody_holds_does_not_matter(fake, tmp_path):
    path = built()
    path.unlink()
    path.with_suffix(".lock").touch()
    (path.parent / f"build-{path.stem}-left").mkdir()
    assert built() == path
    assert contents(tmp_path) == [path.name]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_folder_that_others_can_write_is_refused(fake, tmp_path, mode):
    for is_there in (False, True):
        if is_there:
            (tmp_path / "cache").chmod(0o700)
            built()
        (tmp_path / "cache").mkdir(exist_ok=True)
        (tmp_path / "cache").chmod(mode)
        with pytest.raises(BuildError, match=r"can be written by other users.*chmod -R go-w"):
            built()
    with pytest.raises(BuildError, match=r"can be written by other users"):
        kernel_cache.clear()
    assert len(contents(tmp_path)) == 1


def test_a_file_that_others_can_write_is_refused(fake):
    path = built()
    path.chmod(0o620)
    with pytest.raises(BuildError, match=rf"{path.name} can be written by other users"):
        built()


def test_a_link_in_place_of_a_library_is_refused(fake, tmp_path):
    path = built()
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(BuildError, match="is no file: remove it"):
        built()


def test_what_belongs_to_another_user_is_refused(fake, tmp_path, monkeypatch):
    path = built()
    if os.geteuid() == 0:
        os.chown(path, NOBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    with pytest.raises(BuildError, match=r"belongs to user \d+, and this process runs as user"):
        built()
    if os.geteuid() == 0:
        os.chown(path, 0, -1)
        assert built() == path
        os.chown(path.parent, NOBODY, -1)
        with pytest.raises(BuildError, match=rf"cache belongs to user {NOBODY}"):
            built()


@contextlib.contextmanager
def as_nobody(*paths: Path) -> Iterator[None]:
    """As a user whom permissions hold for, which they do not for root; the paths become theirs."""
    if os.geteuid() != 0:
        yield
        return
    for path in paths:
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def reachable(monkeypatch) -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    for name, value in install_fake(folder).items():
        monkeypatch.setenv(name, value)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_that_can_only_be_read_serves_what_it_has(reachable):
    path = built()
    with as_nobody(path, path.parent):
        path.parent.chmod(0o500)
        os.utime(path, (1000, 1000))
        assert built() == path
        with pytest.raises(BuildError, match=r"building it there failed: .*CUTE_ATTENTION_CACHE"):
            built(dataclasses.replace(SOURCE, chips=(86,)))
        assert [entry.path for entry in kernel_cache.entries()] == [path]
        path.parent.chmod(0o700)
    assert len(calls(reachable)) == 1


def test_the_cache_stays_below_its_size(fake, tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_cache.SIZE, str(int(2.5 * BYTES)))
    sources = [dataclasses.replace(SOURCE, chips=(chip,)) for chip in (80, 86, 87, 89)]
    first, second, third = (built(source) for source in sources[:3])
    assert not first.exists()
    os.utime(third, (1000, 1000))
    built(sources[1])  # used again
    fourth = built(sources[3])
    assert set(contents(tmp_path)) == {second.name, fourth.name}
    monkeypatch.setenv(kernel_cache.SIZE, "10")  # not even for one: it is there for who built it
    assert built(sources[0]).exists()
    assert contents(tmp_path) == [first.name]
    monkeypatch.setenv(kernel_cache.SIZE, "2G")
    with pytest.raises(BuildError, match="CUTE_ATTENTION_CACHE_SIZE is '2G', expected a number"):
        kernel_cache.size_limit()


def test_the_command_lists_and_clears(fake, tmp_path, capsys):
    path = built()
    running = start(fake, "source = build.Source(row, (90,))\nbuild.build(source, True)",
                    FAKE_NVCC="slow", FAKE_NVCC_SECONDS=str(SECONDS))  # fmt: skip
    until(lambda: len(calls(tmp_path)) == 2)
    (path.parent / f"build-{path.stem}-left").mkdir()
    (path.parent / "notes.txt").write_text("of the user")
    assert cache_command.main([], "cache") == 0
    listed = capsys.readouterr().out
    assert f"{tmp_path / 'cache'}: 1 kernels, 0.0 MB of 2048.0 MB" in listed
    assert path.name in listed
    assert cache_command.main(["clear"], "cache") == 0
    assert "removed 1 kernels" in capsys.readouterr().out
    assert running.wait() == 0, "clearing does not disturb a build that runs"
    assert len(contents(tmp_path)) == 2
    assert "notes.txt" in contents(tmp_path)


def changed_header(folder: Path) -> build.Source:
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "new.h").write_text(str(time.time_ns()))
    return dataclasses.replace(SOURCE, include=folder / "mine")


def changed_launch(folder: Path) -> build.Source:
    (folder / "launch.h").write_text(str(time.time_ns()))
    return dataclasses.replace(SOURCE, launch=folder / "launch.h")


def test_whatever_changes_the_library_changes_its_key(fake, tmp_path, monkeypatch):
    tools = toolchain.find()
    folder = tmp_path / "checkout"
    for name in ("include", "src"):
        shutil.copytree(build.instance.sources() / name, folder / name)
    monkeypatch.setattr(build.instance, "sources", lambda: folder)
    key = build.key_of(SOURCE, tools)
    assert build.key_of(SOURCE, tools) == key
    others = [
        dataclasses.replace(SOURCE, row=dataclasses.replace(ROW, stages=2)),
        dataclasses.replace(SOURCE, row=dataclasses.replace(ROW, ptxas="O3")),
        dataclasses.replace(SOURCE, chips=(80, 90)),
    ]
    keys = [key, *(build.key_of(other, tools) for other in others)]
    for change in (changed_header, changed_launch):
        keys += [build.key_of(change(tmp_path), tools) for _ in range(2)]
    for name in ("include/cute_attention/core/mask.h", "src/device.cu", "src/kernels/row.h"):
        with (folder / name).open("a") as file:
            file.write("\n")
        keys.append(build.key_of(SOURCE, tools))
    for variable, value in (("FAKE_NVCC_VERSION", "13.9.0"), ("NVCC_APPEND_FLAGS", "-G")):
        monkeypatch.setenv(variable, value)
        toolchain._known.cache_clear()
        keys.append(build.key_of(SOURCE, toolchain.find()))
    toolchain._known.cache_clear()
    assert len(set(keys)) == len(keys) == 1 + 3 + 4 + 3 + 2


def test_missing_tools_say_how_to_get_them(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "_nvcc_candidates", lambda: iter([None, str(tmp_path / "no")]))
    with pytest.raises(
        BuildError, match=r'nvcc was not found.*\n.*pip install "cuda-toolkit\[nvcc'
    ):
        built()
    monkeypatch.undo()
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    with pytest.raises(BuildError, match=r"CuTe headers were not found.*\n.*nvidia-cutlass==4.2.0"):
        toolchain._find_cutlass()
    include = tmp_path / "include"
    (include / "cute").mkdir(parents=True)
    (include / "cutlass").mkdir()
    version = "#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR 9\n#define CUTLASS_PATCH 2\n"
    (include / "cutlass" / "version.h").write_text(version)
    with pytest.raises(BuildError, match=r"holds CUTLASS 3.9.2; the kernels are written for 4.2.0"):
        toolchain._find_cutlass()


def test_headers_of_another_abi_are_refused_before_compiling(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(core, "build_info", lambda: {"version": "0.1.0", "kernel_abi": 12345})
    build._version.cache_clear()
    with pytest.raises(BuildError, match=r"has kernel ABI \d+, and the installed core 12345"):
        built()
    build._version.cache_clear()
    assert calls(tmp_path) == []


def test_a_compiler_that_does_not_run_is_told(fake, tmp_path, monkeypatch):
    Path(fake["CUDACXX"]).write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(BuildError, match="does not run"):
        built()
    assert contents(tmp_path) == []
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(fake["CUDACXX"], check=True)
