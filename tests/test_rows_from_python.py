"""Rows written in Python: their columns and their proofs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cute_attention.errors import BuildError, RowError
from cute_attention.native import instance, rows
from cute_attention.rows import Row


@pytest.mark.parametrize("row", rows.table(), ids=lambda row: row.name)
def test_a_row_of_the_tables_can_be_written_down(row):
    assert rows.parse(row.line()) == [row]
    written = Row.of(row.name)
    assert dataclasses_but_name(written.columns) == dataclasses_but_name(row)
    assert written.name.startswith(row.key_name())


def dataclasses_but_name(row: rows.TableRow) -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if name != "name"}


def test_lines_are_those_of_the_tables():
    text = "".join(file.read_text() for file in rows.tables_folder().glob("*.def"))
    assert all(f"{row.line()}\n" in text for row in rows.table())


def test_what_is_left_out_comes_from_the_nearest_row():
    row = Row("sm80", "forward", "fp16", head_dim=64)
    assert row.nearest == "sm80_fwd_fp16_d64"
    assert row.name == "sm80_fwd_fp16_d64_m128n64s1w4_o1"
    wider = Row("sm80", "forward", "bf16", head_dim=72, tile_n=32)
    assert (wider.nearest, wider.columns.head_dim_v) == ("sm80_fwd_bf16_d96", 72)
    assert (wider.columns.tile_n, wider.columns.ptxas) == (32, "O3")
    both = Row("sm90", "backward", "bf16", head_dim=64, score_mods=("alibi", "softcap"))
    assert both.nearest == "sm90_bwd_bf16_d128_softcap_alibi"
    assert both.columns.score_mods == ("softcap", "alibi")
    assert Row("sm80", "forward", "bf16", head_dim=512).nearest == "sm80_fwd_bf16_d256"
    assert Row.of("sm80_fwd_fp16_d64") == row != wider
    assert {row: 1}[Row.of("sm80_fwd_fp16_d64")] == 1
    assert repr(row).startswith("Row(arch='sm80', direction='forward', dtype='fp16', head_dim=64")


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"arch": "sm100"}, ValueError, "arch is 'sm100', expected one of ('sm80', 'sm90')"),
        ({"direction": "fwd"}, ValueError, "direction is 'fwd', expected one of ('forward', "),
        ({"dtype": "fp8"}, ValueError, "dtype is 'fp8', expected one of ('fp16', 'bf16')"),
        ({"head_dim": 60}, ValueError, "head_dim is 60, expected a multiple of 8"),
        ({"head_dim": 64.0}, TypeError, "head_dim is a float, expected an int"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v is 0, expected a positive int"),
        ({"tile_m": True}, TypeError, "tile_m is a bool, expected an int"),
        ({"tile_n": -8}, ValueError, "tile_n is -8, expected a positive int"),
        ({"warps": 33}, ValueError, "warps is 33, expected 1 to 32"),
        ({"ptxas": "O4"}, ValueError, "ptxas is 'O4', expected one of ('O0', 'O1', 'O2', 'O3')"),
        ({"score_mods": "tanh"}, ValueError, "score_mods has 'tanh', expected some of ('softcap'"),
    ],
)
def test_wrong_columns_are_refused(columns, error, message):
    right = {"arch": "sm80", "direction": "forward", "dtype": "bf16", "head_dim": 64}
    with pytest.raises(error) as refused:
        Row(**right | columns)
    assert message in str(refused.value)


def test_wrong_arguments_are_refused(tmp_path):
    row = Row.of("sm80_fwd_bf16_d64")
    for call, message in (
        (lambda: Row.of("sm80_fwd_bf16_d63"), "name is 'sm80_fwd_bf16_d63', expected a row of"),
        (lambda: Row.of("sm80_fwd_bf16_d64", tile=3), "no column is called 'tile', they are"),
        (lambda: row.build(include=tmp_path / "no"), "include is .*no, expected a folder"),
        (lambda: row.build(source=tmp_path), "source is .*, expected a file"),
        (lambda: row.build(chips=[75]), r"chips is \(75,\), expected compute capabilities"),
        (lambda: row.build(chips=[]), r"chips is \(\), expected compute capabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="include is an int, expected a path or None"):
        row.check(include=3)


def test_check_proves_a_row_and_refuses_one_that_cannot_be_right(tmp_path):
    pytest.importorskip("pycute")
    (report,) = Row.of("sm80_fwd_bf16_d64", tile_n=128).check()
    assert len(report.results) > 20 and not report.violations
    with pytest.raises(RowError, match=r"_m128n72s1w4_o1 does not compile: .*static assertion"):
        Row.of("sm80_fwd_bf16_d64", tile_n=72).check()
    header = Path("cute_attention") / "sm80" / "forward_traits.h"
    text = (instance.sources() / "include" / header).read_text()
    (tmp_path / header).parent.mkdir(parents=True)
    (tmp_path / header).write_text(text.replace("(kSwizzle >= 64)", "false"))
    with pytest.raises(RowError, match=r"\d+ of \d+ proofs do not hold\n(.*\n)*  banks: .* 2-way"):
        Row.of("sm80_fwd_bf16_d64").check(include=tmp_path)


def test_build_errors_are_runtime_errors():
    assert issubclass(BuildError, RuntimeError) and issubclass(RowError, ValueError)
