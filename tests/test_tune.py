"""`tune` without a GPU: a search compiled into a folder, and gone on with.

What compiles is the C++ compiler, with a launch class that is made up (fake_nvcc.py). A process
cannot unload a library, so each test that loads has a process of its own. In those the layout lab's
proofs are left out: test_row_search.py has them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from built_rows import calls
from cute_attention.cli.tune import main
from cute_attention.native import core, resources, rows, toolchain
from cute_attention.tune import folder as folders
from tuning import SHAPE, UNPROVEN, entries, manifest, run, tune

pytestmark = pytest.mark.skipif(not core.available(), reason="the core library is not installed")


def test_it_compiles_into_a_folder_and_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    first = f"{SHAPE} --build-only --output {out}"
    said = tune(tmp_path, first)
    assert "looking for 2 candidates for each of 1 rows, estimated for NVIDIA A100" in said
    assert "not measured, as --build-only asks" in said
    assert f"python -m cute_attention tune --measure-only --input {out}" in said
    built = entries(out)
    assert built[0]["columns"]["tile_n"] == 64, "the present row is the first"
    (search,) = folders.read(out).searches
    assert search.subject.present in rows.table(), "it is read as it was written"
    assert len(built) == 3 and len({each["name"] for each in built}) == 3
    assert all((out / each["file"]).is_file() and not each["error"] for each in built)
    assert len(calls(tmp_path)) == 3

    # The same command compiles what is missing, and nothing else.
    shutil.rmtree(tmp_path / "cache")
    (out / built[1]["file"]).unlink()
    assert "going on with the search" in tune(tmp_path, first)
    assert len(calls(tmp_path)) == 4
    assert entries(out) == [
        {**each, "seconds": now["seconds"]} for each, now in zip(built, entries(out), strict=True)
    ]
    # The printed command, which says what was left to the machine, is the same search.
    arguments = manifest(out)["arguments"]
    assert arguments[-2:] == ["--chips", "80"]
    tune(tmp_path, " ".join(arguments))
    # How much time there is and who is measured beside are no other search; another shape is.
    tune(tmp_path, f"{first} --minutes=3 --rounds 2 --peers flash --plot p.png")
    assert len(calls(tmp_path)) == 4
    other = f"{first} --heads-kv 1"
    done = run(tmp_path, f"{UNPROVEN}raise SystemExit(main(['tune', *{other!r}.split()]))")
    assert done.returncode == 2
    assert "holds another search (python -m cute_attention tune --arch sm80" in done.stderr


def test_kernels_of_other_headers_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    text = f"{SHAPE} --build-only --output {out}"
    tune(tmp_path, text)
    data = manifest(out)
    (out / "manifest.json").write_text(json.dumps({**data, "sources": "of an older day"}))
    done = run(tmp_path, f"{UNPROVEN}raise SystemExit(main(['tune', *{text!r}.split()]))")
    assert done.returncode == 2 and "holds kernels of other headers" in done.stderr


def test_what_does_not_compile_is_told_and_tried_again(tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    text = f"{SHAPE} --build-only --output {out}"
    said = tune(tmp_path, text, FAKE_NVCC="fail")
    assert "nvcc ended with exit code 2" in said
    assert all("too large" in each["error"] and not each["file"] for each in entries(out))
    tune(tmp_path, text)
    assert all(each["file"] and not each["error"] for each in entries(out))


def test_what_spills_is_no_candidate(tmp_path: Path) -> None:
    spilling = """
from cute_attention.tune import compile
compile.spilled_bytes = lambda library: 64 if "n64" not in library.name else 8
"""
    out = tmp_path / "tuned"
    said = tune(tmp_path, f"{SHAPE} --row tile_n=32 --build-only --output {out}", spilling)
    present, first, *_ = entries(out)
    assert present["file"] and not present["error"], "the row of the tables stays"
    assert not first["file"]
    assert first["error"] == "it spills: its threads keep 64 bytes in local memory"
    assert "it spills: its threads keep 64 bytes" in said


USAGE = """
Fatbin elf code:
arch = sm_90a
 Function _ZN4rows3fwdE:
  REG:168 STACK:{} SHARED:0 LOCAL:{} CONSTANT[0]:1424 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _ZN4rows6finishE:
  REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:400 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_spills_are_read_from_what_cuobjdump_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "cuobjdump"
    monkeypatch.setattr(toolchain, "program", lambda name: str(tmp_path / name))
    for stack, local, expected in ((0, 0, 0), (48, 0, 48), (0, 16, 16)):
        text = USAGE.format(stack, local)
        program.write_text(f"#!/bin/sh\ntest $1 = --dump-resource-usage && cat <<'END'{text}END\n")
        program.chmod(0o755)
        assert resources.spilled_bytes(tmp_path / "library.so") == expected
    program.write_text("#!/bin/sh\nexit 1\n")
    assert resources.spilled_bytes(tmp_path / "library.so") is None
    monkeypatch.setattr(toolchain, "program", lambda name: None)
    assert resources.spilled_bytes(tmp_path / "library.so") is None


def test_without_a_compiler_it_says_so_and_lists_candidates(tmp_path: Path) -> None:
    without = """
from cute_attention.errors import BuildError
from cute_attention.native import toolchain
def none():
    raise BuildError("nvcc was not found")
toolchain.find = none
"""
    said = tune(tmp_path, f"{SHAPE} --output {tmp_path / 'tuned'}", without)
    assert "not compiled: nvcc was not found" in said
    assert "not measured: PyTorch sees no GPU" in said
    assert said.count("not compiled") == 4, "and each row of the list"


def test_own_rows_come_first(tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    own = "--row tile_n=64 --row tile_m=64,tile_n=112 --row tile_n=48,ptxas=O3 --row tile_n=64"
    own += " --row tile_m=64,tile_n=112"
    tune(tmp_path, f"{SHAPE} {own} --build-only --output {out}")
    tiles = [(e["columns"]["tile_m"], e["columns"]["tile_n"]) for e in entries(out)]
    assert tiles == [(128, 64), (64, 112), (128, 48)], "none twice, and not the present row"
    assert entries(out)[2]["columns"]["ptxas"] == "O3"


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = f"--input {tmp_path}"
    for text, message in (
        (f"--measure-only {empty}", "has no manifest.json, expected a folder that `tune` has"),
        ("--arch sm100", "invalid choice: 'sm100'"),
        ("--direction fwdbwd", "'fwdbwd' is not one of fwd, bwd"),
        ("--row tile_m", "'tile_m' is not COLUMN=VALUE"),
        ("--chips 75", "'75' is not a list such as 80,90"),
        ("--chips 80,x", "'80,x' is not a list such as 80,90"),
        ("--chips ''", "is not a list such as 80,90"),
        ("--candidates 0", "'0' is not a positive number"),
        ("--minutes -1", "'-1' is not a positive number"),
        ("--minutes nan", "'nan' is not a positive number"),
        ("--time-ms x", "'x' is not a positive number"),
        ("--build-only --measure-only", "not allowed with argument"),
        (f"--arch sm80 --row tile=3 {empty}", "--row has 'tile', expected columns of tile_m, "),
        (f"--arch sm80 --row head_dim=64 {empty}", "--row has 'head_dim', expected columns of"),
        (f"--arch sm80 --row tile_m=0 {empty}", "tile_m is 0, expected a positive int"),
        (f"--arch sm80 --row tile_m=x {empty}", "--row: Row: tile_m is a str, expected an int"),
        (f"--measure-only --head-dims 64 {empty}", "of a search holds, so leave out --head-dims"),
        (f"--arch sm80 --head-dims 512 {empty}", "no row of the tables of sm80 computes"),
    ):
        try:
            code = main(text.split())
        except SystemExit as exit_:  # argparse refuses it
            code = exit_.code
        assert code == 2, text
        assert message in capsys.readouterr().err, text
    (tmp_path / "manifest.json").write_text('{"schema": 0}')
    assert main(f"--measure-only {empty}".split()) == 2
    assert "is no manifest of this tool (schema 1)" in capsys.readouterr().err
    for damaged in ('{"schema": 1, "arg', '{"schema": 1}', '{"schema": 1, "arguments": 2}'):
        (tmp_path / "manifest.json").write_text(damaged)
        assert main(f"--measure-only {empty}".split()) == 2
        assert f"{tmp_path / 'manifest.json'} is no manifest" in capsys.readouterr().err
