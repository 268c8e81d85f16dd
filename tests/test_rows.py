"""The kernel tables: every row is well named, and C++, CMake and Python read the same rows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from cute_attention.native import rows
from shared_memory import BOOKKEEPING, tile_bytes

ROOT = Path(__file__).resolve().parents[1]
TABLE = rows.table()

# The enums of include/cute_attention/config.h, in the words of the tables.
ARCHS = {"sm80": 80, "sm90": 90}
DIRECTIONS = {"forward": 0, "backward": 1}
DTYPES = {"fp16": 0, "bf16": 1}
MASKS = {"any": 0, "full": 1, "causal": 2}
SCORE_MODS = {"none": 0, "softcap": 1}


def test_tables_are_not_empty_and_names_are_unique():
    names = [row.name for row in TABLE]
    assert len(names) >= 4
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_name_spells_the_key(row):
    key = row.key_name()
    assert row.name == key or row.name.startswith(key + "_")


def test_every_sm80_key_has_a_row_for_99_kb():
    """Chips of compute capability 8.6, 8.9 and 12.0 give a CTA 101376 bytes."""
    smallest: dict[str, int] = {}
    for row in TABLE:
        if row.arch == "sm80":
            needed = tile_bytes(row) + BOOKKEEPING[row.arch, row.direction]
            smallest[row.key_name()] = min(needed, smallest.get(row.key_name(), needed))
    assert len(smallest) >= 28
    assert {key: size for key, size in smallest.items() if size > 101376} == {}


def test_every_line_that_looks_like_a_row_is_one():
    for file in rows.tables_folder().glob("*.def"):
        text = file.read_text()
        calls = re.findall(r"^\s*CUTE_ATTENTION_", text, re.MULTILINE)
        assert len(rows.parse(text)) == len(calls)


def as_cpp_prints(row: rows.TableRow) -> str:
    columns = (
        row.name,
        ARCHS[row.arch],
        DIRECTIONS[row.direction],
        DTYPES[row.dtype],
        row.head_dim,
        row.head_dim_v,
        MASKS[row.mask],
        SCORE_MODS[row.score_mod],
        row.tile_m,
        row.tile_n,
        row.stages,
        row.warps,
    )
    return " ".join(map(str, columns))


def test_cpp_reads_the_same_rows(tmp_path):
    program = tmp_path / "rows"
    source = ROOT / "tests" / "cpp" / "test_rows.cpp"
    command = ["c++", "-std=c++17", f"-I{ROOT}/include", f"-I{ROOT}/src", source, "-o", program]
    subprocess.run(command, check=True)
    printed = subprocess.run([program, "print"], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == [as_cpp_prints(row) for row in TABLE]


def test_cmake_reads_the_same_rows(tmp_path):
    script = tmp_path / "rows.cmake"
    script.write_text(f"""
include("{ROOT}/cmake/rows.cmake")
foreach(table forward backward)
  if(EXISTS "{ROOT}/src/kernels/${{table}}.def")
    cute_attention_read_rows("{ROOT}/src/kernels/${{table}}.def" rows)
    foreach(row IN LISTS rows)
      message(NOTICE "${{row}} ${{rows_${{row}}_ARCH}} ${{rows_${{row}}_DIRECTION}}")
    endforeach()
  endif()
endforeach()
""")
    cmake = shutil.which("cmake", path=sysconfig.get_path("scripts")) or "cmake"
    result = subprocess.run([cmake, "-P", script], check=True, capture_output=True, text=True)
    assert result.stderr.splitlines() == [f"{row.name} {row.arch} {row.direction}" for row in TABLE]


def test_readme_has_the_current_support_matrix():
    readme = (ROOT / "README.md").read_text()
    match = re.search(r"<!-- support matrix: .*?-->\n(.*?)<!-- end -->", readme, re.DOTALL)
    assert match is not None
    assert match[1] == rows.support_matrix(TABLE)
