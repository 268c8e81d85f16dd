"""What columns for study make of a row's layouts: what the layout lab proves and predicts of them,
and what the traits of sm90 choose."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cute_attention.errors import RowError
from cute_attention.native import study
from cute_attention.native.study import Study
from cute_attention.rows import Row
from study_cases import NEEDS

pytestmark = pytest.mark.xdist_group("study_layouts")

ROOT = Path(__file__).resolve().parents[1]

# Rows with small tiles, whose layouts C++ derives soonest, and the rules that their columns break.
PROVEN = {
    ("sm80_fwd_bf16_d32", "copies", "plain"): set(),
    ("sm80_fwd_bf16_d64", "stages", 2): set(),
    ("sm80_fwd_bf16_d64", "probabilities", "shared"): set(),
    ("sm80_fwd_bf16_d64", "swizzle", 64): {"banks"},
    ("sm80_fwd_bf16_d64", "swizzle", 32): {"banks"},
    ("sm80_fwd_bf16_d64", "swizzle", 0): {"banks"},
    ("sm80_bwd_bf16_d32", "copies", "plain"): set(),
    ("sm80_bwd_bf16_d32", "swizzle", 32): {"banks"},
    ("sm80_bwd_bf16_d64", "swizzle", 64): {"banks"},
    ("sm80_bwd_bf16_d64", "swizzle", 0): {"banks"},
    ("sm80_bwd_bf16_d32", "fragments_ahead", 0): set(),
    ("sm90_fwd_bf16_d64", "swizzle", 64): set(),
    ("sm90_fwd_bf16_d64", "swizzle", 32): set(),
    ("sm90_fwd_bf16_d64x512_qv", "swizzle", 64): set(),
    ("sm90_fwd_bf16_d64x512_qv", "softmax", "exact"): set(),
    ("sm90_bwd_bf16_d64", "swizzle", 64): set(),
    ("sm90_bwd_bf16_d64", "swizzle", 32): set(),
    ("sm90_bwd_bf16_d256", "swizzle", 64): set(),
    ("sm90_bwd_bf16_d64", "grad_q", "late"): set(),
    ("sm90_bwd_bf16_d64", "grad_q", "same"): set(),
    ("sm90_bwd_bf16_d64", "grad_q_sums", "none"): set(),
    ("sm90_bwd_bf16_d64", "key_stages", 2): set(),
}


@pytest.fixture(scope="module")
def violated() -> dict[tuple[str, str, object], set[str]]:
    """The rules that each row breaks. All are compiled together, which takes a minute."""
    pytest.importorskip("pycute")
    from cute_attention.layouts import checks, export, model

    made = {key: Row.of(key[0], **NEEDS.get(key[1], {}), **{key[1]: key[2]}) for key in PROVEN}
    reports = checks.check_all(
        model.kernels([export.Request(row.columns) for row in made.values()])
    )
    assert all(len(report.results) >= 14 for report in reports)
    own = {
        key: [report for report in reports if report.kernel.row.name == row.name]
        for key, row in made.items()
    }
    for key, found in own.items():
        assert len(found) == 1 + made[key].columns.has_two_kernels(), "the kernels of the row"
    return {
        key: {result.rule for report in found for result in report.violations}
        for key, found in own.items()
    }


@pytest.mark.parametrize(("name", "column", "value"), PROVEN)
def test_the_lab_proves_what_the_columns_leave_right(violated, name, column, value):
    assert violated[name, column, value] == PROVEN[name, column, value]


def test_check_refuses_a_row_without_a_swizzle(violated):
    with pytest.raises(RowError, match=r"proofs do not hold\n(.*\n)*  banks: k.* at worst 8-way"):
        Row.of("sm80_fwd_bf16_d64", swizzle=0).check()
    assert Row.of("sm80_fwd_bf16_d64", stages=2).check()


def test_the_lab_predicts_the_conflicts_of_each_swizzle():
    """8 rows of 128 bytes, whose vectors change places within fewer bytes: 8, 4, 2 and 1 passes."""
    pytest.importorskip("pycute")
    from cute_attention.layouts import export, model, ncu

    widths = {0: 8, 32: 4, 64: 2, 128: 1}
    made = [Row.of("sm80_fwd_bf16_d64", swizzle=width) for width in widths]
    kernels = model.kernels([export.Request(row.columns) for row in made])
    call = ncu.Call(heads=3, queries=256, keys=192)
    for kernel, passes in zip(kernels, widths.values(), strict=True):
        counters = ncu.predicted(kernel, call)
        assert counters["ldmatrix wavefronts"] == passes * 4 * counters["ldmatrix"]
        assert counters["ldmatrix conflicts"] == (passes - 1) * 4 * counters["ldmatrix"]
        # A warp of 32 queries loads 2 x 4 fragments of Q, 4 x 4 of K and 4 x 4 of V for each tile.
        assert counters["ldmatrix"] == 3 * 2 * 3 * 4 * (8 + 16 + 16)


def test_the_lab_edits_columns_for_study():
    from cute_attention.layouts import errors, export

    row = export.edited(export.find_row("sm80_fwd_bf16_d64"), ["swizzle=64", "tile_n=32"])
    assert (row.study, row.tile_n) == (Study(swizzle=64), 32)
    for change, message in (
        ("swizzle=48", "expected one of 128, 64, 32, 0"),
        ("swizzle=no", "swizzle is an integer"),
        ("turns=off", "sm80 forward kernels have no such column"),
        ("study=1", "expected COLUMN=VALUE, COLUMN one of"),
    ):
        with pytest.raises(errors.LayoutError, match=message):
            export.edited(export.find_row("sm80_fwd_bf16_d64"), [change])


def test_the_lab_knows_when_dq_is_computed():
    """dQ that is one step late is computed once more than there are steps of a block of keys."""
    pytest.importorskip("pycute")
    from cute_attention.layouts import export, model, ncu

    columns: tuple[dict[str, str], ...] = ({}, {"grad_q": "late"}, {"grad_q": "same"})
    made = [Row.of("sm90_bwd_bf16_d64", **column) for column in columns]
    kernels = model.kernels([export.Request(row.columns) for row in made])
    once, again = ncu.Call(2, 512, 1024), ncu.Call(2, 1024, 1024)
    usual, late, same = (
        [ncu.predicted(kernel, call)["WGMMA wavefronts"] for call in (once, again)]
        for kernel in kernels
    )
    assert usual == late
    assert same[1] == 2 * same[0], "each step has as many"
    assert late[0] > same[0] and late[1] - late[0] == same[0], "and each block of keys one more"


TRAITS = """
#include "layouts/host_cuda.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/grad_kv_traits.h"
#include "cute_attention/sm90/grad_q_traits.h"
#include "cute_attention/sm90/mla_traits.h"
namespace cute_attention {
template <int kHeadDim, uint32_t kMods, int kTileM, int kTileN>
struct R {
  static constexpr KernelKey kKey{Arch::Sm90, Direction::Backward, DType::BFloat16, kHeadDim,
                                  kHeadDim, kMods};
  static constexpr KernelConfig kConfig{kTileM, kTileN, 2, 12};
};
using Usual64 = R<64, score_mods::None, 128, 128>;
using Usual128 = R<128, score_mods::None, 64, 128>;
using Usual96 = R<96, score_mods::None, 64, 128>;
using Alibi64 = R<64, score_mods::Alibi, 128, 128>;
using Usual256 = R<256, score_mods::None, 128, 64>;
struct First : Usual128 {};
struct Late : Usual64 {};
struct Same : Usual64 {};
struct NoSums : R<128, score_mods::None, 128, 64> {};
struct TwoKeys : Usual128 {};
struct OneKey : Usual96 {};
struct Biased : R<128, score_mods::Bias, 64, 128> {};
struct Narrow : Usual64 {};
struct Narrow256 : Usual256 {};
struct Latent {
  static constexpr KernelKey kKey{Arch::Sm90, Direction::Forward, DType::BFloat16, 64, 512,
                                  score_mods::Qv};
  static constexpr KernelConfig kConfig{64, 64, 2, 12};
};
struct ExactLatent : Latent {};
@choices@
using sm90::BackwardTraits, sm90::kSumsGradQ, sm90::kOneTile;
static_assert(BackwardTraits<Usual64>::kGradQFirst && !BackwardTraits<Usual128>::kGradQFirst);
static_assert(!BackwardTraits<Alibi64>::kGradQFirst && BackwardTraits<Alibi64>::kGradQLag == 1);
static_assert(BackwardTraits<First>::kGradQFirst && BackwardTraits<First>::kGradQLag == 1);
static_assert(!BackwardTraits<Late>::kGradQFirst && BackwardTraits<Late>::kGradQLag == 1);
static_assert(!BackwardTraits<Same>::kGradQFirst && BackwardTraits<Same>::kGradQLag == 0);
static_assert(kSumsGradQ<Usual64> && kSumsGradQ<Usual128> && !kSumsGradQ<Usual256>);
static_assert(!kSumsGradQ<NoSums> && kOneTile<NoSums> && !kOneTile<Usual256>);
static_assert(BackwardTraits<Usual128>::kStagesK == 1 && BackwardTraits<TwoKeys>::kStagesK == 2);
static_assert(BackwardTraits<Usual96>::kStagesK == 2 && BackwardTraits<OneKey>::kStagesK == 1);
static_assert(kOneTile<sm90::BiasFromGlobal<Biased>>, "another kernel of a row has its choices");
static_assert(BackwardTraits<Usual64>::kBox == 64 && BackwardTraits<Usual64>::kBoxColsK == 64);
static_assert(BackwardTraits<Narrow>::kBox == 32 && BackwardTraits<Narrow>::kBoxV == 32 &&
              BackwardTraits<Narrow>::kBoxColsK == 32 && BackwardTraits<Narrow>::kBoxS == 32);
using sm90::GradKvTraits, sm90::GradQTraits;
static_assert(GradKvTraits<Narrow256>::kBox == 16 && GradKvTraits<Usual256>::kBox == 64);
static_assert(GradQTraits<Narrow256>::kBoxV == 16 && GradQTraits<Usual256>::kBoxV == 64);
static_assert(sm90::MlaTraits<Latent>::kMostLag == 14 && sm90::MlaTraits<Latent>::kBoxV == 64);
static_assert(sm90::MlaTraits<ExactLatent>::kMostLag == 0 &&
              sm90::MlaTraits<ExactLatent>::kBoxV == 32);
}
"""


def test_the_traits_of_sm90_make_the_choices(tmp_path):
    pytest.importorskip("pycute")
    from cute_attention.layouts import export

    made = {
        "First": Study(grad_q="first"),
        "Late": Study(grad_q="late"),
        "Same": Study(grad_q="same"),
        "NoSums": Study(grad_q_sums="none", grid="one_tile"),
        "TwoKeys": Study(key_stages=2),
        "OneKey": Study(key_stages=1),
        "Biased": Study(grid="one_tile"),
        "Narrow": Study(swizzle=64),
        "Narrow256": Study(swizzle=32),
        "ExactLatent": Study(softmax="exact", swizzle=64),
    }
    choices = "".join(study.specialisation(value, name) for name, value in made.items())
    source = tmp_path / "traits.cpp"
    source.write_text(TRAITS.replace("@choices@", choices))
    command = ["c++", "-std=c++17", "-fsyntax-only", "-w", f"-I{ROOT}/include", f"-I{ROOT}/src"]
    command += ["-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", *export._include_flags(), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
