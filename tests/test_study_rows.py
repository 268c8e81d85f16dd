"""Rows with columns for study: what they may be, and what C++ is told."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from built_rows import install_fake, run
from cute_attention.native import core, instance, rows, study
from cute_attention.native.study import COLUMNS, TABLES, Study
from cute_attention.rows import Row
from study_cases import FAMILIES, NEEDS, cases

ROOT = Path(__file__).resolve().parents[1]
ENUMS = {
    *("copies", "loads", "softmax", "probabilities", "turns", "grid"),
    *("grad_q", "grad_q_sums"),
}


def row_of(family: tuple[str, str], **columns: str | int) -> Row:
    return Row(*family, "bf16", head_dim=64, **columns)


def test_every_column_has_a_default_that_is_its_first_value():
    assert [field.name for field in dataclasses.fields(Study)] == list(COLUMNS)
    for name, column in COLUMNS.items():
        usual = getattr(TABLES, name)
        assert usual in column.values
        others = [value for value in column.values if value != usual]
        assert others and {column.words[value] for value in others} >= {column.words[others[0]]}
        for allowed in column.kernels.values():
            assert usual in allowed
    words = [
        column.words[value]
        for name, column in COLUMNS.items()
        for value in column.values
        if value != getattr(TABLES, name)
    ]
    assert len(set(words)) == len(words), "two rows would have one name"


def test_cpp_has_the_same_choices(tmp_path):
    """study.h says of the tables what Python says, and knows every value."""
    lines = ['#include "cute_attention/study.h"', "using namespace cute_attention;"]
    for name, column in COLUMNS.items():
        if not column.member:
            continue
        usual = column.values[getattr(TABLES, name)]
        lines.append(f'static_assert(TableChoices::{column.member} == {usual}, "{name}");')
        values = [*column.values.values()]
        assert len(set(values)) == len(values)
        if name in ENUMS:
            lines += [f"constexpr auto {name}_{i} = {value};" for i, value in enumerate(values)]
    made = Study(copies="plain", swizzle=32, fragments_ahead=7, fast_math="off")
    lines += [
        "struct Row {};",
        "namespace cute_attention {",
        study.specialisation(made, "Row"),
        "}",
    ]
    lines.append(
        "static_assert(StudyOf<Row>::kCopies == Copies::Plain && StudyOf<Row>::kSwizzle == 32 && "
        "StudyOf<Row>::kFragmentsAhead == 7 && StudyOf<Row>::kLoads == Loads::Eager);"
    )
    lines.append("static_assert(StudyOf<int>::kCopies == Copies::Async);")
    source = tmp_path / "study.cpp"
    source.write_text("\n".join([*lines, ""]))
    command = ["c++", "-std=c++17", "-fsyntax-only", "-Wall", f"-I{ROOT}/include", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("family", FAMILIES, ids="_".join)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_taken_where_kernels_have_it_and_refused_elsewhere(family, name):
    allowed = COLUMNS[name].kernels.get(family, ())
    needs = NEEDS.get(name, {}) if allowed else {}
    usual = row_of(family, **needs)
    for value in list(COLUMNS[name].values)[:5]:
        if value == getattr(TABLES, name):
            assert row_of(family, **needs, **{name: value}) == usual
        elif value in allowed:
            row = row_of(family, **needs, **{name: value})
            assert row.name == f"{usual.name}_{COLUMNS[name].words[value]}"
            assert f"{name}={value!r}" in repr(row)
            assert row != usual
        else:
            with pytest.raises(ValueError, match=f"Row: {name} is {value!r}, "):
                row_of(family, **{name: value})


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("sm80_fwd_bf16_d64", {"stages": 3}, "stages is 3, expected 1 or 2"),
        ("sm80_fwd_bf16_d64", {"loads": "late", "stages": 2}, "loads is 'late' and stages is 2"),
        (
            "sm90_fwd_bf16_d128",
            {"turns": "on", "tile_m": 64, "warps": 8},
            "turns is 'on' and tile_m is 64",
        ),
        (
            "sm90_fwd_bf16_d64x512_qv",
            {"turns": "off"},
            "turns is 'off' and score_mods has 'qv': of its two warpgroups one computes S",
        ),
        (
            "sm90_fwd_bf16_d128",
            {"swizzle": 0},
            "expected of an sm90 forward kernel 128, 64, 32: WGMMA takes a tile without a swizzle",
        ),
        (
            "sm90_bwd_bf16_d128",
            {"fragments_ahead": 0},
            "and sm90 backward kernels have no such column: WGMMA reads tiles from shared memory",
        ),
        (
            "sm90_fwd_bf16_d128",
            {"copies": "plain"},
            "Theirs for study are swizzle, softmax, turns, grid, fast_math",
        ),
        (
            "sm80_bwd_bf16_d64",
            {"softmax": "exact"},
            "softmax is 'exact', and sm80 backward kernels have no such column: a backward has the "
            "LSE of the forward, and follows no maximum. "
            "Theirs for study are copies, swizzle, fragments_ahead, fast_math",
        ),
        (
            "sm90_fwd_bf16_d128",
            {"grad_q": "same"},
            "grad_q is 'same', and sm90 forward kernels have no such column",
        ),
        (
            "sm90_bwd_bf16_d256",
            {"grad_q": "late"},
            "grad_q is 'late', and the row keeps no sums of dQ: a kernel of its own",
        ),
        (
            "sm90_bwd_bf16_d128",
            {"grad_q": "same", "grad_q_sums": "none", "tile_m": 128, "tile_n": 64},
            "grad_q is 'same', and the row keeps no sums of dQ",
        ),
        (
            "sm90_bwd_bf16_d128",
            {"grad_q_sums": "none"},
            "tile_m is 64, tile_n 128 and warps 12, expected tile_m=128, tile_n=64, warps=12",
        ),
        (
            "sm90_bwd_bf16_d192",
            {"grad_q_sums": "none"},
            "grad_q_sums is 'none' and head_dim is 192: above 128 the rows of the tables",
        ),
        (
            "sm90_bwd_bf16_d128_softcap",
            {"grad_q": "first"},
            "grad_q is 'first' and score_mods has 'softcap', with which P is computed after dP",
        ),
        ("sm80_fwd_bf16_d64", {"swizzle": "64"}, "swizzle is '64', expected one of 128, 64, 32, 0"),
        ("sm80_fwd_bf16_d64", {"fragments_ahead": True}, "is True, expected one of 0 to 64"),
        ("sm80_fwd_bf16_d64", {"fragments_ahead": 65}, "is 65, expected one of 0 to 64"),
    ],
)
def test_what_makes_no_sense_is_refused_with_words(name, columns, message):
    with pytest.raises(ValueError) as refused:
        Row.of(name, **columns)
    assert message in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES, ids="_".join)
def test_a_family_says_why_it_lacks_a_column_or_a_value(family):
    """In words of the column's own, where it lacks something and nowhere else."""
    for name, column in COLUMNS.items():
        allowed = column.kernels.get(family, ())
        lacks = [value for value in column.values if value not in allowed]
        assert bool(lacks) == (family in column.without), name
        for value in lacks[:3]:
            if value != getattr(TABLES, name):
                with pytest.raises(ValueError) as refused:
                    row_of(family, **{name: value})
                assert column.without[family] in str(refused.value)


def test_unknown_columns_are_refused():
    with pytest.raises(TypeError, match="no column is called 'swizle'; those for study are"):
        Row("sm80", "forward", "bf16", head_dim=64, swizle=64)
    with pytest.raises(ValueError, match="no column is called 'swizle', they are"):
        Row.of("sm80_fwd_bf16_d64", swizle=64)


def test_a_gpu_is_given_every_column_of_every_family():
    """By study_cases.py: each value, but of the many numbers of fragments ahead some."""
    tried = {
        (row.columns.arch, row.columns.direction, name, value)
        for row in cases()
        for name, value in study.changes(row.columns.study)
    }
    for family in FAMILIES:
        for name, column in COLUMNS.items():
            wanted = {*column.kernels.get(family, ())} - {getattr(TABLES, name)}
            found = {value for *others, value in tried if others == [*family, name]}
            assert found <= wanted
            assert found == wanted if len(wanted) < 10 else len(found) == 3, (family, name)
    names = [row.name for row in cases()]
    assert len({*names}) == len(names)


def test_a_swizzle_is_on_or_off():
    usual = Row.of("sm80_fwd_bf16_d128")
    assert Row.of("sm80_fwd_bf16_d128", swizzle=True) == usual
    assert Row.of("sm80_fwd_bf16_d128", swizzle=False).columns.study == Study(swizzle=0)
    with pytest.raises(ValueError, match="swizzle is 0, expected of an sm90 forward kernel 128"):
        Row.of("sm90_fwd_bf16_d128", swizzle=False)


def test_no_table_takes_a_row_for_study():
    assert {row.study for row in rows.table()} == {TABLES}
    with pytest.raises(ValueError, match="_swizzle0 is a row for study, which no table can have"):
        Row.of("sm80_fwd_bf16_d64", swizzle=0).columns.line()
    assert "StudyOf" not in instance.instance_text(Row.of("sm80_fwd_bf16_d64").columns, "a.h")


def test_compile_options_are_a_column():
    usual = instance.compile_flags(Row.of("sm90_fwd_bf16_d128").columns, (90,))
    exact = instance.compile_flags(Row.of("sm90_fwd_bf16_d128", fast_math="off").columns, (90,))
    assert [flag for flag in usual if flag not in exact] == ["--use_fast_math"]
    assert len(exact) == len(usual) - 1
    assert "-Xptxas=-O2" in instance.options(Row.of("sm80_fwd_bf16_d64", ptxas="O2").columns)


@pytest.mark.skipif(not core.available(), reason="the core library is not installed")
def test_a_built_kernel_is_compiled_with_its_choices(tmp_path):
    """The launch class of a test sees them in the generated source."""
    install_fake(tmp_path)
    fake = ROOT / "tests/cpp/fake_launch/cute_attention/sm80/forward_launch.h"
    launch = tmp_path / "launch.h"
    launch.write_text(
        '#include "cute_attention/study.h"\n'
        + fake.read_text().replace(
            "  static constexpr int kThreads",
            "  static_assert(StudyOf<Row>::kSwizzle == 32 && StudyOf<Row>::kLoads == Loads::Late,\n"
            '                "as the row says");\n  static constexpr int kThreads',
        )
    )
    done = run(
        tmp_path,
        f"""
from cute_attention import rows
row = rows.Row.of("sm80_fwd_bf16_d64", swizzle=32, loads="late")
kernel = row.build(source={str(launch)!r})
assert kernel.name.startswith("sm80_fwd_bf16_d64_m128n64s1w4_o1_late_swizzle32_"), kernel.name
assert kernel.on_request
try:
    rows.Row.of("sm80_fwd_bf16_d64", swizzle=32).build(source={str(launch)!r})
except rows.BuildError as error:
    assert "nvcc ended with exit code" in str(error)
else:
    raise AssertionError("it has other choices")
""",
    )
    assert done.returncode == 0, done.stderr
