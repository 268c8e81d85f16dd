"""Rows that nvcc builds from Python, one of each architecture: the compiler's own report, and the
library in a process of its own. `make audit` runs this, since a row takes a minute.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cute_attention.native import core, rows
from test_kernel_audit import INSTRUCTIONS, cuobjdump, is_of, number_of_kernels

pytestmark = [
    pytest.mark.skipif(not core.available(), reason="the core library is not installed"),
    pytest.mark.skipif(
        "CUTE_ATTENTION_BUILD" not in os.environ,
        reason="CUTE_ATTENTION_BUILD is not set: make audit",
    ),
]

BUILD = """
import dataclasses, json, sys, time
from cute_attention import kernels, rows
row = rows.Row.of(sys.argv[1], **{sys.argv[2]: int(sys.argv[3])})
start = time.monotonic()
kernel = row.build(chips=[80])
seconds = time.monotonic() - start
assert row.build(chips=[80]) == kernel and kernel in kernels()
print(json.dumps([dataclasses.asdict(kernel), seconds]))
"""


# Rows that are in no table, with the fewest instructions, which compile fastest.
@pytest.mark.parametrize(
    ("name", "column", "value"),
    [("sm80_fwd_bf16_d32", "tile_n", 64), ("sm90_fwd_bf16_d64", "stages", 3)],
)
def test_a_row_built_from_python_is_as_good_as_one_of_cmake(tmp_path, name, column, value):
    environment = os.environ | {"CUTE_ATTENTION_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", BUILD, name, column, str(value)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernel, seconds = json.loads(done.stdout)
    row = next(row for row in rows.table() if row.name == name)
    assert kernel["on_request"]
    assert (kernel[column], kernel["threads"]) == (value, row.warps * 32)

    (library,) = (tmp_path / "cache").iterdir()
    resources = re.findall(r"Function (\w+):\s*\n(.*)", cuobjdump("--dump-resource-usage", library))
    own = [used for function, used in resources if is_of(function, kernel["name"])]
    assert len(own) == number_of_kernels(row)
    for numbers in own:
        used = {key: int(number) for key, number in re.findall(r"([A-Z]+):(\d+)", numbers)}
        assert (used["STACK"], used["LOCAL"]) == (0, 0)
        assert 0 < used["REG"] * row.warps * 32 <= 65536
    sass = cuobjdump("-sass", library)
    opcodes = set(re.findall(r"\b([A-Z][A-Z0-9]+)(?:\.[A-Z0-9_.]+)?\b", sass))
    assert set(INSTRUCTIONS[row.arch]) <= opcodes
    assert not {"LDL", "STL"} & opcodes, "registers spilled to local memory"
    assert seconds > 5, "it was compiled here"


def test_nvcc_shows_its_own_words_and_leaves_nothing(tmp_path):
    header = Path("cute_attention") / "sm80" / "forward_traits.h"
    (tmp_path / header).parent.mkdir(parents=True)
    (tmp_path / header).write_text("#error of my own\n")
    code = (
        "import sys\nfrom cute_attention import rows\n"
        "try:\n    rows.Row.of('sm80_fwd_bf16_d32').build(include=sys.argv[1])\n"
        "except rows.BuildError as error:\n    print(error)\n"
    )
    environment = os.environ | {"CUTE_ATTENTION_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "nvcc ended with exit code" in done.stdout
    assert "#error of my own" in done.stdout
    assert list((tmp_path / "cache").iterdir()) == []
