"""The life of a row that is built from Python, in what test_kernel_cache.py leaves: its flags,
files in the cache that are not what they should be, and who sees it until its context ends.

The compiler is fake_nvcc.py. A process cannot unload a library, so what loads has its own process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import test_dispatch
from built_rows import BUILD, ON_A_GPU, PREAMBLE, ROW, SOURCE, calls, contents, install_fake, run
from cute_attention.errors import BuildError
from cute_attention.native import build, core, instance
from cute_attention.native.study import Study
from test_kernel_cache import NOBODY

pytestmark = pytest.mark.skipif(not core.available(), reason="the core library is not installed")


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    """The folder of a test that has the compiler, its log and the cache."""
    for name, value in install_fake(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def built(source: build.Source = SOURCE) -> Path:
    path = build.build(source, is_study=True)[1]
    assert path is not None
    return path


# ---- flags


def test_the_compiler_gets_the_flags_of_the_row(fake):
    """Those of its table line and its columns for study, and no other row's."""
    exact = dataclasses.replace(ROW, ptxas="O2", study=Study(fast_math="off"))
    built(dataclasses.replace(SOURCE, chips=(80, 90)))
    built(dataclasses.replace(SOURCE, row=exact))
    usual, other = ({*words} for words in calls(fake))
    target = "-gencode=arch=compute_80,code=[compute_80,sm_80{}]"
    assert {target.format(",sm_90"), "-Xptxas=-O1", "--use_fast_math", "-shared"} <= usual
    assert {target.format(""), "-Xptxas=-O2", "-shared"} <= other
    assert "--use_fast_math" not in other and "-Xptxas=-O1" not in other
    for words, row, chips in ((usual, ROW, (80, 90)), (other, exact, (80,))):
        assert {*instance.compile_flags(row, chips)} <= words


def test_flags_that_the_compiler_refuses_are_told_and_leave_nothing(fake, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--unknown-flag")
    with pytest.raises(BuildError, match=r"exit code 1\nnvcc fatal +: Unknown option '--unknown-f"):
        built()
    assert contents(fake) == []
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    path = built()
    assert contents(fake) == [path.name]


def test_other_flags_make_another_library(fake, monkeypatch):
    """Flags of the environment, and an edit of the list that CMake reads too."""
    paths = [built()]
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-lineinfo")
    paths.append(built())
    known = instance.flags()
    monkeypatch.setattr(
        instance, "flags", lambda: {**known, "kernels": (*known["kernels"], "-DMINE")}
    )
    paths.append(built())
    assert len(set(paths)) == len(calls(fake)) == 3


def test_a_terminal_is_shown_how_long_it_takes(fake):
    """In a line that is written over."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + BUILD],
        env=os.environ | {"FAKE_NVCC": "slow", "FAKE_NVCC_SECONDS": "2.5"},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    said = ""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 1000):
            said += part.decode()
    os.close(ours)
    assert process.wait() == 0
    seconds = [int(found) for found in re.findall(r"\rcute_attention: building .*: (\d) s", said)]
    assert seconds == sorted(seconds) and {*seconds} & {1, 2}
    assert re.search(r"\r\x1b\[Kcute_attention: built \S+ in \d s\r\n$", said)


# ---- files in the cache that others made


def test_a_link_in_place_of_the_lock_is_not_followed(fake):
    path = built()
    path.unlink()
    victim = fake / "victim"
    victim.write_text("mine")
    path.with_suffix(".lock").symlink_to(victim)
    with pytest.raises(BuildError, match=r"building it there failed: .*symbolic links"):
        built()
    assert victim.read_text() == "mine"
    assert len(calls(fake)) == 1


def test_a_link_in_place_of_the_folder_leads_to_a_folder_that_is_judged(fake, monkeypatch):
    elsewhere = fake / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (fake / "cache").symlink_to(elsewhere)
    path = built()
    assert (elsewhere / path.name).is_file() and built() == path
    elsewhere.chmod(0o770)
    with pytest.raises(BuildError, match="cache can be written by other users"):
        built()
    elsewhere.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(elsewhere, NOBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    with pytest.raises(BuildError, match=r"belongs to user \d+, and this process runs as user"):
        built()
    assert len(calls(fake)) == 1


def test_a_folder_in_place_of_a_library_is_refused(fake):
    path = built()
    path.unlink()
    path.mkdir()
    with pytest.raises(BuildError, match="is no file: remove it"):
        built()


LOAD = """
from pathlib import Path
import pytest
from cute_attention import kernels, rows
row = rows.Row("sm80", "forward", "fp16", head_dim=64, tile_n=32)
"""


def test_a_library_that_does_not_load_is_told_and_built_anew(tmp_path):
    """One that is none, as a full disk or another program may leave it."""
    done = run(
        tmp_path,
        LOAD
        + """
with pytest.raises(rows.BuildError, match="file too short|invalid ELF header") as told:
    row.build()
assert "Removing the file has it built again" in str(told.value)
assert kernels() == []
""",
        FAKE_NVCC="text",
    )
    assert done.returncode == 0, done.stderr
    (library,) = (tmp_path / "cache").iterdir()
    library.unlink()
    done = run(tmp_path, LOAD + "assert kernels() == [] and row.build() in kernels()")
    assert done.returncode == 0, done.stderr
    assert len(calls(tmp_path)) == 2


def test_a_library_of_another_abi_is_not_loaded(tmp_path):
    """It lies where the right one would, as if the hash had missed something."""
    done = run(tmp_path, LOAD + "row.build()")
    assert done.returncode == 0, done.stderr
    (library,) = (tmp_path / "cache").iterdir()
    old = test_dispatch.build(tmp_path / "old", "old", FAKE_ABI=12345)
    library.write_bytes(old.read_bytes())
    done = run(
        tmp_path,
        LOAD
        + """
with pytest.raises(rows.BuildError, match="it has kernel ABI 12345") as told:
    row.build()
assert "Removing the file has it built again" in str(told.value)
assert kernels() == []
""",
    )
    assert done.returncode == 0, done.stderr
    library.unlink()
    done = run(tmp_path, LOAD + "assert row.build() in kernels()")
    assert done.returncode == 0, done.stderr


# ---- who sees it, and when it leaves

SEEN = (
    ON_A_GPU
    + """
from cute_attention.bench.contenders import ours
from cute_attention.bench.points import Point
ours.needs_gpu = lambda device: None
bench = ours.Sm80()
point = Point(batch=2, seqlen_q=64, seqlen_k=64, heads=2, heads_kv=2, head_dim=64, head_dim_v=64,
              dtype="fp16")

def measured():
    # Why bench would not measure the family, or None.
    with FakeTensorMode():
        return bench.missing(GPU) or bench.refuses(point, "fwd")

def explained():
    with FakeTensorMode():
        q = torch.empty(2, 64, 2, 64, dtype=torch.float16, device="cuda")
        answer = explain(q, q, q)
    return answer.chosen, [c.name for report in answer.forward for c in report.rows if c.chosen]

assert kernels() == [] and measured() == "no sm80 kernel is loaded"
assert explained() == ("reference", [])
"""
)


def test_a_built_row_is_seen_and_leaves_with_its_context(tmp_path):
    """kernels(), explain and bench see it; outside of its context no choice takes it."""
    done = run(
        tmp_path,
        SEEN
        + """
kernel = row.build()
assert kernels() == [kernel]
for _ in range(2):
    assert "it serves only calls that ask for it" in measured()
    assert explained() == ("reference", [])
    with rows.use(kernel):
        assert measured() is None
        assert explained() == ("sm80", [kernel.name])
    with pytest.raises(ZeroDivisionError), rows.use(kernel):
        assert explained() == ("sm80", [kernel.name])
        1 / 0
assert "it serves only calls that ask for it" in measured()
assert explained() == ("reference", [])
assert kernels() == [kernel], "it stays loaded"
""",
    )
    assert done.returncode == 0, done.stderr


def test_a_library_loaded_later_is_seen_by_all(tmp_path):
    library = test_dispatch.build(tmp_path / "later", "later")
    done = run(
        tmp_path,
        SEEN
        + f"""
added = rows.load_library({str(library)!r})
assert kernels() == added and measured() is None
backend, (chosen,) = explained()
assert backend == "sm80" and chosen in [kernel.name for kernel in added]
""",
    )
    assert done.returncode == 0, done.stderr


def test_the_cache_may_be_emptied_while_a_kernel_is_loaded(tmp_path):
    done = run(
        tmp_path,
        SEEN
        + """
from cute_attention.native import kernel_cache
kernel = row.build()
assert [entry.row for entry in kernel_cache.clear()] == [kernel.name]
with rows.use(kernel):
    assert explained() == ("sm80", [kernel.name])
""",
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == []
