"""The kernel tables: every row is well named, and C++, CMake and Python read the same rows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from cute_attention.native import instance, rows
from shared_memory import BOOKKEEPING, reads_cache, tile_bytes

ROOT = Path(__file__).resolve().parents[1]
TABLE = rows.table()
CMAKE = shutil.which("cmake", path=sysconfig.get_path("scripts")) or "cmake"

# The enums of include/cute_attention/config.h, in the words of the tables.
ARCHS = {"sm80": 80, "sm90": 90}
DIRECTIONS = {"forward": 0, "backward": 1}
DTYPES = {"fp16": 0, "bf16": 1}
SCORE_MODS = {"softcap": 32, "alibi": 2, "bias": 1, "dropout": 8, "qv": 128}  # bits of Feature
SINK = 4  # a bit of Feature: every row serves a sink
CACHE = 64  # likewise, for rows that `reads_cache`


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
        sum(SCORE_MODS[name] for name in row.score_mods),
        sum(SCORE_MODS[name] for name in row.score_mods) + SINK + CACHE * reads_cache(row),
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
      set(row_text "${{row}}")
      foreach(field ARCH DIRECTION PTXAS)
        string(APPEND row_text " ${{rows_${{row}}_${{field}}}}")
      endforeach()
      message(NOTICE "${{row_text}}")
    endforeach()
  endif()
endforeach()
""")
    result = subprocess.run([CMAKE, "-P", script], check=True, capture_output=True, text=True)
    assert result.stderr.splitlines() == [
        f"{row.name} {row.arch} {row.direction} {row.ptxas}" for row in TABLE
    ]


def instance_options(folder: Path, name: str, ptxas: str, wgmma: str) -> tuple[int, str]:
    """What cmake/rows.cmake says of an instance: its exit status and its options or its error."""
    script = folder / "options.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/rows.cmake")\n'
        f'cute_attention_instance_options("{name}" "{ptxas}" "{wgmma}" options)\n'
        'message(NOTICE "${options}")\n'
    )
    result = subprocess.run([CMAKE, "-P", script], capture_output=True, text=True)
    return result.returncode, " ".join(result.stderr.split())


def test_compile_options_are_those_that_the_rows_ask_for(tmp_path):
    extended = "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"
    for ptxas, wgmma, options in (
        ("O1;O1", "", "-Xptxas=-O1"),
        ("O3;O3", "", ""),
        ("O3", "128;64;128;64", ""),
        ("O3", "80;256", extended),
        ("O2", "96;176", f"-Xptxas=-O2;{extended}"),
    ):
        assert instance_options(tmp_path, "sm00_fwd_d8", ptxas, wgmma) == (0, options)
    status, error = instance_options(tmp_path, "sm00_fwd_d8", "O1;O3", "")
    assert status != 0
    assert "the rows of sm00_fwd_d8 differ in dtype alone and are compiled together" in error


def test_rows_with_unusual_wgmmas_ask_for_them():
    """dQ at head dim 96 has 48 columns for each warpgroup. CuTe would take three WGMMAs of 16."""
    asked = {row.name for row in TABLE if "-DCUTE_SM90_EXTENDED" in " ".join(instance.options(row))}
    assert "sm90_bwd_bf16_d96" in asked
    assert not {"sm90_bwd_bf16_d128", "sm90_bwd_bf16_d192", "sm90_fwd_bf16_d128"} & asked


def test_python_compiles_rows_with_the_options_of_cmake(tmp_path):
    """Those of each row, and the targets of each list of chips."""
    asked = [(row, (80,)) for row in TABLE]
    both = [next(row for row in TABLE if row.direction == way) for way in ("forward", "backward")]
    lists = ((86,), (80, 86), (90,), (80, 90, 120), (120, 80), (90, 120))
    asked += [(row, chips) for row in both for chips in lists]
    lines = [
        f'include("{ROOT}/cmake/rows.cmake")',
        f'include("{ROOT}/cmake/architectures.cmake")',
        "cute_attention_read_flags(kernels kernels)",
    ]
    for table in ("forward", "backward"):
        lines.append(f'cute_attention_read_rows("{ROOT}/src/kernels/{table}.def" rows)')
    for row, chips in asked:
        archs = "90a" if row.arch == "sm90" else ";".join(map(str, chips))
        lines += [
            f'cute_attention_read_archs("{archs}" families)',
            f"cute_attention_row_wgmma({row.name} wgmma)" if row.arch == "sm90" else "set(wgmma)",
            f'cute_attention_instance_options(row "{row.ptxas}" "${{wgmma}}" options)',
            f"set(all ${{kernels}} ${{families_{row.arch}_{row.direction}_FLAGS}} ${{options}})",
            'message(NOTICE "${all}")',
        ]
    script = tmp_path / "options.cmake"
    script.write_text("\n".join(lines))
    result = subprocess.run([CMAKE, "-P", script], check=True, capture_output=True, text=True)
    for (row, chips), line in zip(asked, result.stderr.splitlines(), strict=True):
        ours = instance.compile_flags(row, chips)
        assert ";".join(ours).endswith(f";{line}"), row.name
        assert len(ours) == len(line.split(";")) + 3


def test_readme_has_the_current_support_matrix():
    readme = (ROOT / "README.md").read_text()
    match = re.search(r"<!-- support matrix: .*?-->\n(.*?)<!-- end -->", readme, re.DOTALL)
    assert match is not None
    assert match[1] == rows.support_matrix(TABLE)
