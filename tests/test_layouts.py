"""The layout lab: every row keeps all rules, broken layouts violate them, and mistakes of the user
are explained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cute_attention.cli.layouts import main
from cute_attention.layouts import checks, hardware
from cute_attention.layouts.export import Request, described, edited, find_row
from cute_attention.layouts.model import Kernel, kernels
from cute_attention.native import rows
from layout_mutations import BACKWARD, FORWARD
from layout_mutations_sm90 import (
    HOPPER_BACKWARD,
    HOPPER_FORWARD,
    HOPPER_GRAD_KV,
    HOPPER_GRAD_Q,
    HOPPER_MLA,
    HOPPER_OUTPUT,
)
from narrow_blocks import NARROW_BLOCKS
from shared_memory import BOOKKEEPING, has_two_kernels, tile_bytes

pytestmark = pytest.mark.xdist_group("layouts")

TABLE = [row for row in rows.table() if described(row)]


@pytest.fixture(scope="module")
def reports() -> dict[str, list[checks.Report]]:
    """The reports of the kernels of each row."""
    found: dict[str, list[checks.Report]] = {}
    for report in checks.check_all(kernels([Request(row) for row in TABLE])):
        found.setdefault(report.kernel.row.name, []).append(report)
    return found


def test_tests_of_a_group_share_a_worker(request):
    """Else each worker would compile all layouts for its part of the tests."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@layouts")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_proof_about_every_row_holds(reports, row):
    for report in reports[row.name]:
        assert not report.violations
        rules = {result.rule for result in report.results}
        assert {"layout", "copied once", "fragments", "plan", "alignment", "occupancy"} <= rules
        assert len(report.results) >= 12


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_each_row_has_the_kernels_and_the_shared_memory_that_its_columns_say(reports, row):
    found = [report.kernel for report in reports[row.name]]
    parts = ["grad_kv", "grad_q"] if has_two_kernels(row) else [""]
    assert [kernel.part for kernel in found] == parts
    beside_tiles = max(kernel.plan["bytes"] for kernel in found) - tile_bytes(row)
    assert 0 <= beside_tiles <= BOOKKEEPING[row.arch, row.direction]


# Rows of other kernel families, whatever the tables hold.
BACKWARD_ROW = rows.TableRow(
    *("sm80_bwd_bf16_d128_test", "sm80", "backward", "bf16", 128, 128, ()),
    *(64, 128, 1, 8),
)
HOPPER = rows.TableRow(
    *("sm90_fwd_bf16_d128_test", "sm90", "forward", "bf16", 128, 128, ()),
    *(128, 128, 2, 12),
)
# Of head dim 64 the warpgroups share the queries of dQ, of head dim 128 the columns.
HOPPER_BACKWARD_64 = rows.TableRow(
    *("sm90_bwd_bf16_d64_test", "sm90", "backward", "bf16", 64, 64, ()),
    *(128, 128, 2, 12),
)
HOPPER_BACKWARD_128 = rows.TableRow(
    *("sm90_bwd_bf16_d128_test", "sm90", "backward", "bf16", 128, 128, ()),
    *(64, 128, 2, 12),
)
# One kernel for dK and dV, another for dQ.
HOPPER_BACKWARD_256 = rows.TableRow(
    *("sm90_bwd_bf16_d256_test", "sm90", "backward", "bf16", 256, 256, ()),
    *(128, 64, 2, 12),
)
# The mutations of each kernel, and the row, the traits and the adapter that they change.
MUTATIONS = [
    (find_row("sm80_fwd_bf16_d128"), "sm80::ForwardTraits", "Sm80Forward", FORWARD),
    (HOPPER, "sm90::ForwardTraits", "Sm90Forward", HOPPER_FORWARD),
    (find_row("sm90_fwd_bf16_d64_m128"), "sm90::ForwardTraits", "Sm90Forward", HOPPER_OUTPUT),
    (BACKWARD_ROW, "sm80::BackwardTraits", "Sm80Backward", BACKWARD),
    (HOPPER_BACKWARD_128, "sm90::BackwardTraits", "Sm90Backward", HOPPER_BACKWARD),
    (HOPPER_BACKWARD_256, "sm90::GradKvTraits", "Sm90GradKv", HOPPER_GRAD_KV),
    (HOPPER_BACKWARD_256, "sm90::GradQTraits", "Sm90GradQ", HOPPER_GRAD_Q),
    (find_row("sm90_fwd_bf16_d64x512_qv"), "sm90::MlaTraits", "Sm90Mla", HOPPER_MLA),
]


@pytest.fixture(scope="module")
def mutated() -> dict[str, checks.Report]:
    every = [
        (mutation, Request(row, mutation.kernels, mutation.preamble(base, adapter)))
        for row, base, adapter, family in MUTATIONS
        for mutation in family
    ]
    found = checks.check_all(kernels(request for _, request in every))
    return {mutation.name: report for (mutation, _), report in zip(every, found, strict=True)}


@pytest.mark.parametrize(
    ("row", "products"),
    [
        (HOPPER, [2]),
        (BACKWARD_ROW, [5 + 2]),  # and LSE, delta
        (HOPPER_BACKWARD_64, [5 + 2]),
        (HOPPER_BACKWARD_128, [5 + 2]),
        (HOPPER_BACKWARD_256, [4 + 2 + 1, 3 + 2]),  # and factors
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_proof_about_other_families_holds(row, products):
    reports = checks.check_all(kernels([Request(row)]))
    for report, count in zip(reports, products, strict=True):
        assert not report.violations
        found = [result.rule for result in report.results]
        assert found.count("fragments") == count
        assert {"copied once", "alignment", "plan", "registers"} <= set(found)


def test_every_proof_about_calls_with_few_keys_holds():
    """Those of sm90/few_keys.h, whose tiles are not those of their row."""
    listed = "layouts::Kernels<layouts::Sm90Backward<sm90::BackwardTraits<sm90::FewKeys<Row>>>>"
    preamble = f"template <class Row> using OfFewKeys = {listed};\n"
    request = Request(find_row("sm90_bwd_bf16_d64"), "OfFewKeys", preamble)
    (report,) = checks.check_all(kernels([request]))
    assert report.kernel.tile == (64, 64) and not report.violations
    assert [result.rule for result in report.results].count("fragments") == 5 + 2


@pytest.mark.parametrize(
    "mutation", [m for *_, family in MUTATIONS for m in family], ids=lambda m: m.name
)
def test_each_broken_layout_is_caught_by_the_right_rule(mutated, mutation):
    caught = {(bad.rule, bad.subject.split(" ")[0]) for bad in mutated[mutation.name].violations}
    assert mutation.violated <= caught
    allowed = {
        "swizzle that splits vectors": {"banks", "fragments"},
        "padding without room for it": {"addresses"},  # an XOR does not reach its rows
        "swizzle of dS removed": {"addresses"},
        "wrong atom for K": {"vectors"},
        "vectors copied twice": {"vectors", "sectors", "fragments"},
        "wrong atom for K transposed": {"vectors", "banks"},
        "LSE of the key": {"vectors", "banks"},
        "wrong atom for dS": {"copied once", "banks"},
        "LSE of the key of sm90": {"vectors", "banks"},
    }
    others = {rule for rule, _ in caught - mutation.violated}
    assert others <= allowed.get(mutation.name, set())


def test_removed_swizzle_costs_eight_way_conflicts(mutated):
    (violation,) = mutated["swizzle removed"].violations
    # K is 64 x 128: 128 ldmatrix.x4 of four phases, each 8 rows in the same 4 banks.
    assert violation.conflicts == 128 * 4 * 7
    assert "at worst 8-way" in violation.number


def test_sums_staged_in_the_order_of_threads_are_caught():
    """Each thread's vectors side by side: all sums are there, but 8 lanes use the same banks."""
    (kernel,) = kernels([Request(HOPPER_BACKWARD_128)])
    (staged,) = [copy for copy in kernel.copies if copy["kind"] == "staged"]
    vectors = np.arange(np.size(staged["vectors"])).reshape(np.shape(staged["vectors"])).tolist()
    others = [copy for copy in kernel.copies if copy is not staged]
    broken = dataclasses.replace(kernel, copies=[*others, staged | {"vectors": vectors}])
    (violation,) = [result for result in checks.check(broken) if not result.ok]
    assert (violation.rule, violation.subject.split(":")[0]) == ("banks", "grad_q")
    # 8 warps with 8 stores of four phases, each 8 lanes in the same 4 banks.
    assert violation.conflicts == 8 * 8 * 4 * 7


def _replaced(kernel: Kernel, tensor: str, kind: str, **fields: object) -> Kernel:
    """The kernel with other fields of one of its copies."""
    copies = [
        copy | fields if (copy["tensor"], copy["kind"]) == (tensor, kind) else copy
        for copy in kernel.copies
    ]
    assert copies != kernel.copies
    return dataclasses.replace(kernel, copies=copies)


def test_what_the_kernel_for_dq_takes_from_elsewhere_is_proven():
    """Boxes of a tensor map that are made for another tile, and the LSE of other rows."""
    _, kernel = kernels([Request(HOPPER_BACKWARD_256)])
    rows_of_lse = next(copy["rows"] for copy in kernel.copies if copy["kind"] == "held")
    for broken, rule, subject in (
        (_replaced(kernel, "k", "boxes", map=[128, 64, 3]), "swizzle", "k: TMA boxes"),
        (_replaced(kernel, "q", "boxes", map=[64, 32, 2]), "swizzle", "q: TMA boxes"),
        (
            _replaced(kernel, "lse", "held", rows=[own[::-1] for own in rows_of_lse]),
            *("fragments", "lse: in registers (S = Q K^T)"),
        ),
    ):
        (violation,) = [result for result in checks.check(broken) if not result.ok]
        assert (violation.rule, violation.subject) == (rule, subject)


def test_blocks_of_32_bytes_are_proven():
    """A swizzle of one bit. With the pattern of two bits TMA would write other addresses than WGMMA
    reads."""
    request = Request(HOPPER_BACKWARD_256, "NarrowBlocksOf", NARROW_BLOCKS)
    right, wrong = checks.check_all(kernels([request]))
    assert not right.violations
    subjects = [result.subject for result in right.results if result.rule == "fragments"]
    assert subjects == ["S = Q K^T", "dQ += S K"]
    assert next(buffer["needs_alignment"] for buffer in right.kernel.plan["buffers"]) == 256
    caught = {(bad.rule, bad.subject.split(" ")[0]) for bad in wrong.violations}
    assert {("swizzle", "k:"), ("copied once", "k:"), ("fragments", "S"), ("fragments", "dQ")} <= (
        caught
    )


def test_an_edited_row_is_checked_with_its_own_layouts():
    row = edited(find_row("sm80_fwd_bf16_d128"), ["tile_n=96"])
    (report,) = checks.check_all(kernels([Request(row)]))
    assert not report.violations
    assert report.kernel.shape("k") == (96, 128)
    assert report.kernel.plan["bytes"] == 2 * 128 * (128 + 96 + 96)


def test_fragments_are_those_of_tensor_layouts():
    atoms = pytest.importorskip("tensor_layouts.atoms_nv")
    atom = atoms.SM80_16x8x16_F32F16F16F32_TN
    ours = hardware.mma_m16n8k16()
    for places, theirs, outer in (
        (ours.a, atom.a_layout, 16),
        (ours.b, atom.b_layout, 8),
        (ours.c, atom.c_layout, 16),
    ):
        assert places is not None
        numbers = np.broadcast_to(places[0] + outer * places[1], places[0].shape)
        expected = [[theirs(t, v) for v in range(numbers.shape[1])] for t in range(32)]
        assert numbers.tolist() == expected


@pytest.mark.parametrize("n", [8, 64, 96, 128, 256])
def test_wgmma_accumulators_are_those_of_tensor_layouts(n):
    atoms = pytest.importorskip("tensor_layouts.atoms_nv")
    theirs = atoms.gmma_c_layout(n)
    row, col = hardware.wgmma_m64k16(n).c
    expected = [[theirs(t, v) for v in range(n // 2)] for t in range(128)]
    assert (row + 64 * col).tolist() == expected


@pytest.mark.parametrize(
    ("stride", "ways"), [(4, 1), (8, 2), (16, 4), (32, 8), (36, 1), (0, 1), (68, 1)]
)
def test_bank_conflicts_are_those_of_tensor_layouts(stride, ways):
    analysis = pytest.importorskip("tensor_layouts.analysis")
    layouts = pytest.importorskip("tensor_layouts")
    words = layouts.Layout((8, 4), (stride, 1))  # 8 lanes, 4 words each
    theirs = analysis.bank_conflicts(words, element_bytes=4)["max_ways"]
    ours = hardware.wavefronts(np.arange(8)[None, :] * stride * 4, 16)
    assert ours.tolist() == [theirs] == [ways]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "sm80_fwd_fp8_d128"], "no row is called 'sm80_fwd_fp8_d128'; the tables have"),
        (["check", "sm80_fwd_bf16_d128", "--set", "tile=3"], "expected COLUMN=VALUE"),
        (["check", "sm80_fwd_bf16_d128", "--set", "tile_n=many"], "tile_n is an integer"),
        (
            ["check", "sm80_fwd_bf16_d128", "--set", "tile_n=72"],
            "static assertion failed: each warp owns whole MMA tiles of S and O",
        ),
        # Kernels that would wait for ever.
        (["check", "sm90_fwd_bf16_d128", "--set", "stages=1"], "K and V of two KV tiles"),
        (["check", "sm90_bwd_bf16_d256", "--set", "stages=1"], "Q and dO of two steps"),
        (["check", "--include", "no/such/folder"], "no/such/folder is not a folder"),
        (["diff", "sm80_fwd_bf16_d128"], "name a second row, or change columns"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_without_a_compiler_it_says_what_to_do(monkeypatch, tmp_path, capsys):
    from cute_attention.layouts import export

    export._compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    try:
        assert main(["check", "sm80_fwd_bf16_d128", "--set", "tile_n=80"]) == 2
    finally:
        export._compiler.cache_clear()
    assert "no C++ compiler was found: install g++ or set CXX" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("CUTLASS_DIR", "the CuTe headers were not found: pip install --no-deps nvidia-cutlass"),
        ("CUDA", "the CUDA headers were not found: pip install"),
    ],
)
def test_without_headers_it_says_what_to_install(variable, message, monkeypatch, tmp_path, capsys):
    from cute_attention.layouts import export

    export._include_flags.cache_clear()
    export._sources_hash.cache_clear()
    if variable == "CUTLASS_DIR":
        monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    else:
        # Headers of the runtime alone, as PyTorch brings them, are not enough.
        monkeypatch.setattr(Path, "is_file", lambda path: path.name != "host_defines.h")
    try:
        assert main(["check", "sm80_fwd_bf16_d128"]) == 2
    finally:
        export._include_flags.cache_clear()
        export._sources_hash.cache_clear()
    assert message in capsys.readouterr().err


def test_rows_of_one_shape_are_compiled_together():
    from cute_attention.layouts import export

    batches = export._batches([Request(row) for row in TABLE], 2)
    assert len(batches) == 2
    assert sorted(r.row.name for b in batches for r in b) == sorted(row.name for row in TABLE)
    shapes = [{request.shape() for request in batch} for batch in batches]
    assert not shapes[0] & shapes[1]


def test_exit_code_says_whether_all_holds(capsys):
    assert main(["check", "sm80_fwd_bf16_d128"]) == 0
    assert "1 rows" in capsys.readouterr().out
    assert main(["check", "sm80_fwd_bf16_d128", "--set", "tile_n=192"]) == 1
    assert "VIOLATED registers" in capsys.readouterr().out
