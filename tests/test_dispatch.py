"""Dispatch and plug-ins, with kernel libraries that need no GPU.

They are compiled here from tests/cpp/fake_kernel_library.cpp. A process loads its kernel
libraries once, so each question is asked in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cute_attention
from cute_attention.dispatch.backends import Report, table
from cute_attention.native import core

ROOT = Path(__file__).resolve().parents[1]
FAKE = ROOT / "tests" / "cpp" / "fake_kernel_library.cpp"
VERSION = core.build_info()["version"] if core.available() else ""
SMALL, LARGE = "fake_sm80_d64_small", "fake_sm80_d64_large"

# The core needs no torch: without the package's __init__, such a process starts in no time.
PREAMBLE = f"""
import json, sys, types
package = sys.modules["cute_attention"] = types.ModuleType("cute_attention")
package.__path__ = {list(cute_attention.__path__)}
from cute_attention.native import core
from cute_attention.native.core import *
"""

pytestmark = pytest.mark.skipif(not core.available(), reason="the core library is not installed")


def build(folder: Path, name: str = "fake", **macros: object) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"libcute_attention_{name}.so"
    macros = {"CUTE_ATTENTION_VERSION": f'"{VERSION}"'} | macros
    defines = [f"-D{macro}={value}" for macro, value in macros.items()]
    command = ["c++", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", *defines]
    subprocess.run([*command, f"-I{ROOT}/include", FAKE, "-o", path], check=True)
    return path


@pytest.fixture(scope="module")
def plugins(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("plugins")).parent


def ask(code: str, *folders: Path, **environment: str):
    """What `code` assigns to `answer`, in a process that finds the libraries in `folders`."""
    variables = dict(os.environ) | environment
    variables["CUTE_ATTENTION_KERNEL_PATH"] = os.pathsep.join(map(str, folders))
    command = [sys.executable, "-c", f"{PREAMBLE}\n{code}\nprint(json.dumps(answer))"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def explain(problem: str, *folders: Path, device: int | None = 0, **environment: str):
    """{row: (chosen, estimate_us, reasons)} of the fake rows."""
    code = (
        f"answer = {{c.name: (c.chosen, c.estimate_us, c.reasons) "
        f"for c in explain(Problem({problem}), {device}) if c.name.startswith('fake')}}"
    )
    return ask(code, *folders, **environment)


D64 = "dtype='fp16', head_dim=64, head_dim_v=64, heads=16, heads_kv=4"
SHORT = D64 + ", seqlen_q=64, seqlen_k=64"
LONG = D64 + ", seqlen_q=8192, seqlen_k=8192"


def test_library_is_found_with_its_rows(plugins):
    answer = ask("answer = [(l.name, l.build, l.rows, l.error) for l in libraries()]", plugins)
    assert answer[0] == ["fake", "g++", 8, ""]
    names = ask("answer = [(r.name, r.arch, r.score_mods, r.threads) for r in kernels()]", plugins)
    assert [SMALL, "sm80", [], 128] in names
    assert ["fake_sm90_d64", "sm90", [], 384] in names


def test_rows_name_the_features_that_they_serve(plugins):
    features = ask("answer = {r.name: r.features for r in kernels()}", plugins)
    assert features["fake_sm90_d64"] == []
    assert features[SMALL] == ["a cache"]
    assert features["fake_sm80_d128"] == ["sink", "a cache"]
    assert features["fake_sm80_d128_softcap"] == ["sink", "dropout", "softcap"]


def test_library_built_later_plugs_in(plugins, tmp_path):
    names = "answer = [r.name for r in kernels() if r.name.startswith('fake')]"
    before = ask(names, plugins, tmp_path)
    build(tmp_path, "later", FAKE_SUFFIX='"_later"')
    after = ask(names, plugins, tmp_path)
    assert len(before) == 8
    assert after == before + [name + "_later" for name in before]


def test_first_folder_wins_where_rows_share_a_name(plugins, tmp_path):
    build(tmp_path, "again")
    paths = ask("answer = [l.path for l in libraries()]", tmp_path, plugins)
    names = [Path(path).name for path in paths[:2]]
    assert names == ["libcute_attention_again.so", "libcute_attention_fake.so"]
    rows = ask(
        "answer = [r.name for r in kernels() if r.name.startswith('fake')]", tmp_path, plugins
    )
    assert len(rows) == len(set(rows)) == 8


def test_rows_can_be_narrowed_down(plugins):
    names = "answer = [r.name for r in kernels() if r.name.startswith('fake')]"
    assert ask(names, plugins, CUTE_ATTENTION_ROWS="^fake_sm90_d64$") == ["fake_sm90_d64"]
    code = "try:\n  kernels()\nexcept Exception as error:\n  answer = str(error)"
    message = ask(code, plugins, CUTE_ATTENTION_ROWS="(")
    assert message.startswith("CUTE_ATTENTION_ROWS is '(', expected a regular expression")


def test_other_abi_is_refused(tmp_path):
    build(tmp_path, "old", FAKE_ABI=12345)
    rows, errors = ask(
        "answer = [[r.name for r in kernels()], [l.error for l in libraries()]]", tmp_path
    )
    assert not [name for name in rows if name.startswith("fake")]
    assert "kernel ABI 12345" in errors[0]
    assert "rebuild it" in errors[0]


def test_files_that_are_no_kernel_library_are_refused(tmp_path):
    (tmp_path / "libcute_attention_text.so").write_text("not a library")
    source = tmp_path / "empty.cpp"
    source.write_text("")
    other = tmp_path / "libcute_attention_unrelated.so"
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", other], check=True)
    (tmp_path / "libcute_attention_torch.so").write_text("the binding's name is not looked at")
    errors = ask(
        "answer = {l.path.rsplit('/', 1)[1]: l.error for l in libraries()}",
        tmp_path,
        tmp_path / "absent",
    )
    assert "file too short" in errors["libcute_attention_text.so"]
    assert (
        "does not export cute_attention_kernel_library" in errors["libcute_attention_unrelated.so"]
    )
    assert "libcute_attention_torch.so" not in errors


def test_devices_come_from_the_kernel_library(plugins):
    devices = ask(
        "answer = [(d.ordinal, d.name, d.compute_capability, d.multiprocessors) "
        "for d in devices()]",
        plugins,
    )
    assert devices == [[0, "fake GPU", 80, 108], [1, "fake GPU", 80, 108]]


def test_short_sequences_take_small_tiles_and_long_ones_large(plugins):
    short = explain(SHORT, plugins)
    long = explain(LONG, plugins)
    assert (short[SMALL][0], short[LARGE][0]) == (True, False)
    assert (long[SMALL][0], long[LARGE][0]) == (False, True)
    assert 0 < short[SMALL][1] < short[LARGE][1]
    assert 0 < long[LARGE][1] < long[SMALL][1]


def test_a_call_with_a_cache_takes_the_row_loaded_first(plugins):
    long = explain(LONG + ", features=64", plugins)
    assert long[LARGE][1] < long[SMALL][1]
    assert (long[SMALL][0], long[LARGE][0]) == (True, False)


@pytest.mark.parametrize(
    ("problem", "row", "reason"),
    [
        (SHORT.replace("fp16", "fp32"), SMALL, "dtype is not the row's fp16"),
        (SHORT.replace("fp16", "bf16"), SMALL, "dtype is not the row's fp16"),
        (SHORT + ", direction='backward'", SMALL, "it computes the forward pass"),
        (SHORT.replace("head_dim=64", "head_dim=72"), SMALL, "head_dim 72 is above the row's 64"),
        (SHORT.replace("head_dim=64", "head_dim=60"), SMALL, "head_dim 60 is not a multiple of 8"),
        (SHORT.replace("_v=64", "_v=96"), SMALL, "head_dim_v 96 is above the row's 64"),
        (SHORT + ", softcap=30.0", SMALL, "it does not serve softcap"),
        (SHORT, "fake_sm80_d128_softcap", "it serves only calls with softcap"),
        (SHORT + ", features=4", "fake_sm80_d128_softcap", "it serves only calls with softcap"),
        (SHORT + ", features=1", SMALL, "it does not serve bias"),
        (SHORT + ", features=2", SMALL, "it does not serve alibi_slopes"),
        (SHORT + ", features=4", SMALL, "it does not serve sink"),
        (SHORT + ", features=12", "fake_sm80_d128", "it does not serve dropout"),
        (SHORT + ", features=8", "fake_sm90_d64", "it does not serve dropout"),
        (SHORT + ", features=16", "fake_sm90_d64", "it does not serve a scale that is"),
        (SHORT, "fake_sm90_d64", "it runs on compute capability 9.0 alone, the device has 8.0"),
    ],
)
def test_reasons(plugins, problem, row, reason):
    chosen, estimate, reasons = explain(problem, plugins)[row]
    assert not chosen
    assert estimate is None
    assert any(text.startswith(reason) for text in reasons), reasons


@pytest.mark.parametrize(
    ("problem", "row"),
    [
        (SHORT + ", window_left=3, window_right=5", SMALL),
        (SHORT + ", window_right=0", "fake_sm80_d128"),
        (SHORT + ", features=4", "fake_sm80_d128"),
        (SHORT + ", softcap=30.0", "fake_sm80_d128_softcap"),
        (SHORT + ", softcap=30.0, features=12", "fake_sm80_d128_softcap"),
        (SHORT + ", softcap=30.0, window_left=63, window_right=0", "fake_sm80_d128_softcap"),
    ],
)
def test_rows_that_serve(plugins, problem, row):
    _, estimate, reasons = explain(problem, plugins)[row]
    assert reasons == []
    assert estimate > 0


def test_splits(plugins):
    """How many CTAs divide the keys of a query: the best number, or what the environment says."""
    problem = "dtype='fp16', head_dim=64, head_dim_v=64, heads=2, heads_kv=2, seqlen_q=1"

    def splits(seqlen_k: int, **environment: str) -> dict[str, int]:
        code = (
            f"answer = {{c.name: c.num_splits for c in explain(Problem({problem}, "
            f"seqlen_k={seqlen_k}), 0) if c.name.startswith('fake')}}"
        )
        return ask(code, plugins, **environment)

    found = splits(65536)
    assert found[SMALL] > 8
    assert found[LARGE] == 1, "a row that does not divide keys"
    assert found["fake_sm90_d64"] == 1, "a row that does not serve"
    assert splits(64)[SMALL] == splits(0)[SMALL] == 1
    assert splits(65536, CUTE_ATTENTION_SPLITS="3")[SMALL] == 3


def test_explain_names_the_splits():
    times = {
        splits: table(
            (
                Report(
                    "sm80", True, (), (core.Candidate("row", "sm80", True, 7.0, [], False, splits),)
                ),
            ),
            estimates=True,
        )
        for splits in (1, 12)
    }
    assert times[1].endswith("(about 7.0 us)")
    assert times[12].endswith("(about 7.0 us, 12 splits of the keys)")


def test_device_limits(plugins):
    hopper = explain(SHORT, plugins, FAKE_CAPABILITY="90")
    assert hopper["fake_sm90_d64"][0]
    assert hopper[SMALL][0], "the best of each backend is chosen"
    turing = explain(SHORT, plugins, FAKE_CAPABILITY="75")
    assert turing[SMALL][2] == ["it needs compute capability 8.0 or newer, the device has 7.5"]
    ada = explain(LONG, plugins, FAKE_CAPABILITY="89", FAKE_SHARED_MEMORY="60000")
    assert ada[LARGE][2] == ["it needs 73728 bytes of shared memory, the device has 60000"]
    assert ada[SMALL][0]
    capped = explain(LONG, plugins, CUTE_ATTENTION_SHARED_MEMORY="60000")
    assert capped[LARGE][2] == ada[LARGE][2]
    assert capped[SMALL][0]
    absent = explain(SHORT, plugins, device=None)
    assert absent[SMALL][2] == ["the tensors are not on a CUDA device"]


def test_backward_takes_the_largest_tiles_that_fit(plugins):
    """A second row is for chips with less shared memory, however short the sequences."""
    small, large = "fake_sm80_bwd_d64_small", "fake_sm80_bwd_d64"
    for problem in (SHORT, LONG):
        backward = problem + ", direction='backward'"
        ampere = explain(backward, plugins)
        assert (ampere[small][0], ampere[large][0]) == (False, True)
        ada = explain(backward, plugins, FAKE_CAPABILITY="89", FAKE_SHARED_MEMORY="60000")
        assert (ada[small][0], ada[large][0]) == (True, False)


def test_a_wrong_limit_of_shared_memory_is_told(plugins):
    code = f"""
try:
    explain(Problem({SHORT}), 0)
except RuntimeError as error:
    answer = str(error)
"""
    for text in ("99k", "-1", "0"):
        told = ask(code, plugins, CUTE_ATTENTION_SHARED_MEMORY=text)
        assert told == f"CUTE_ATTENTION_SHARED_MEMORY is '{text}', expected a number of bytes"
