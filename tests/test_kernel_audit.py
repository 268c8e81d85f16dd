"""What the compiler made of every kernel row in a build folder: its resources and instructions.

`make audit` builds a folder and runs this, without a GPU; CUTE_ATTENTION_BUILD names another
folder.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from cute_attention.native import rows
from loads_under_way import under_way
from shared_memory import BOOKKEEPING, ctas_of_sm, has_two_kernels, reads_cache, tile_bytes

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("CUTE_ATTENTION_BUILD", ROOT / "build" / "audit")).resolve()


def built_objects() -> dict[str, Path]:
    """The object file with the kernels of each row: rows that differ in dtype alone share one. An
    interrupted build has objects, but no library of them yet."""
    objects = {}
    for path in sorted(BUILD.rglob("kernels/*/*.cu.o"), key=lambda path: path.stat().st_mtime):
        arch = path.parent.name
        if not (BUILD / "lib" / f"libcute_attention_{arch}.so").is_file():
            continue
        source = BUILD / "kernels" / arch / path.name.removesuffix(".o")
        for name in re.findall(r"^CUTE_ATTENTION_LAUNCHER\((\w+),", source.read_text(), re.M):
            objects[name] = path
    return objects


OBJECTS = built_objects()
ROWS = [row for row in rows.table() if row.name in OBJECTS]

REGISTERS_OF_A_MULTIPROCESSOR = 65536
# Instructions that the kernels of a family must contain: asynchronous copies, loads of MMA
# operands, MMAs.
INSTRUCTIONS = {"sm80": ("LDGSTS", "LDSM", "HMMA"), "sm90": ("UTMALDG", "HGMMA")}

pytestmark = pytest.mark.skipif(not ROWS, reason=f"no kernels built in {BUILD}: make audit")
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def cuobjdump(*arguments: str | Path) -> str:
    """The cuobjdump from PyPI, which finds nvdisasm in its own folder."""
    folder = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    environment = dict(os.environ, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    command = ["cuobjdump", *arguments]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return result.stdout


def is_of(kernel: str, name: str) -> bool:
    """Whether a kernel with this mangled name belongs to the row."""
    return f"{len(name)}{name}E" in kernel


@functools.cache
def resources(name: str) -> list[tuple[str, str, dict[str, int]]]:
    """(chip, kernel, resources) of every piece of a row's machine code."""
    found = []
    chip = ""
    kernel = None
    for line in cuobjdump("--dump-resource-usage", OBJECTS[name]).splitlines():
        if match := re.match(r"arch = (\w+)", line):
            chip = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            kernel = match[1]
        elif kernel:
            numbers = re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", line)
            if is_of(kernel, name):
                found.append((chip, kernel, {key: int(number) for key, number in numbers}))
            kernel = None
    return found


@functools.cache
def instructions(name: str) -> list[tuple[int, str, str]]:
    """(chip, kernel, line) of the SASS of a row's kernels."""
    found = []
    chip, kernel, own = 0, "", False
    for line in cuobjdump("-sass", OBJECTS[name]).splitlines():
        if match := re.search(r"arch = sm_(\d+)", line):
            chip = int(match[1])
        elif match := re.search(r"Function : (\w+)", line):
            kernel = match[1]
            own = is_of(kernel, name)
        elif own:
            found.append((chip, kernel, line))
    return found


@functools.cache
def loaded_rows() -> dict[str, dict]:
    """The rows as the built libraries report them, from a process that loads them."""
    program = (
        "import json\nfrom dataclasses import asdict\nfrom cute_attention import kernels\n"
        "print(json.dumps([asdict(row) for row in kernels()]))"
    )
    environment = dict(os.environ, CUTE_ATTENTION_KERNEL_PATH=str(BUILD / "lib"))
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    return {row["name"]: row for row in json.loads(output)}


def number_of_kernels(row: rows.TableRow) -> int:
    has_bias = int("bias" in row.score_mods)
    # Of sums of tiles of scores, of tiles that are no sums, and what adds up the parts of sums.
    # Rows of sm90 with head dim 64 have them twice: for small heads too.
    grad_bias = 3 * has_bias * (1 + ((row.arch, row.head_dim) == ("sm90", 64)))
    # The main kernel of sm90 twice: with tiles of the bias by TMA, and without. In rows with a bias
    # alone or with dropout twice more, with tiles of fp32, and with a number for each key.
    of_bias = 0
    if row.arch == "sm90" and has_bias:
        of_bias = 1 if row.serves_subsets() else 3
    if row.direction == "forward":  # one more for keys in a cache, on sm80 for those in pages
        has_both = reads_cache(row) and "qv" not in row.score_mods  # whose calls all have a cache
        few = has_few_queries_kernel(row)  # and so many more for few queries
        return (1 + of_bias + int(has_both)) * (1 + int(few))
    if has_two_kernels(row):
        return 5 + grad_bias  # prepare, grad_kv, grad_kv_sum, grad_q, grad_sink
    if (row.arch, row.score_mods) == ("sm90", ("bias",)):
        grad_bias += 1  # of zeros where a mask hides scores: the main kernel stores the others
        if row.tile_m > 64:  # with steps of 64, too: prepare, main and finish (steps_of_64.h)
            grad_bias += 3
    if row.arch == "sm90" and not row.score_mods and row.head_dim <= 128:
        # Prepare and finish, both twice: with a leftover key too. The main one with sums of dQ, and
        # without. For few keys prepare, main and finish once more (few_keys.h).
        return 9 if row.head_dim == 64 else 6
    return 3 + grad_bias + of_bias  # prepare, main, finish


def has_few_queries_kernel(row: rows.TableRow) -> bool:
    """As core/few_queries.h says."""
    of_forward = (row.arch, row.direction, row.score_mods) == ("sm80", "forward", ())
    return of_forward and row.tile_m == 128 and row.warps % 4 == 0


@each_row
def test_object_file_holds_the_kernels_of_its_row(row):
    kernels = {kernel for _, kernel, _ in resources(row.name)}
    assert len(kernels) == number_of_kernels(row)


def warps_of(row: rows.TableRow, kernel: str) -> int:
    """Of a CTA, at most. The kernels for the gradient of a bias have tiles of their own. The one of
    sm90 that reads a bias from global memory has at most two consumer warpgroups."""
    if "grad_bias" in kernel:
        return 12 if "4sm909grad_biasI" in kernel else 8
    if "10FewQueries" in kernel:
        return row.warps // 2
    if "7FewKeys" in kernel:
        return 8
    return min(row.warps, 12) if "14BiasFromGlobal" in kernel else row.warps


def ctas_of_multiprocessor(row: rows.TableRow, kernel: str) -> int:
    """That run at the same time: kCtasOfSm of ForwardTraits and BackwardTraits."""
    if "sm908backwardINS0_7FewKeys" in kernel:
        return 2
    return 1 if "10CachedKeys" in kernel else ctas_of_sm(row)


@each_row
def test_no_spills_and_registers_fit(row):
    for chip, kernel, used in resources(row.name):
        threads = ctas_of_multiprocessor(row, kernel) * warps_of(row, kernel) * 32
        registers = used["REG"] * threads
        assert registers <= REGISTERS_OF_A_MULTIPROCESSOR, (chip, kernel)
        assert (used["STACK"], used["LOCAL"]) == (0, 0), (chip, kernel)


@each_row
def test_a_cta_has_the_registers_that_its_roles_ask_for(row):
    """At launch each thread has those that the compiler says, as a multiple of 8. A warpgroup that
    asks for more than the others have left waits for ever."""
    asked: dict[str, dict[str, int]] = {}
    for _, kernel, line in instructions(row.name):
        if "HGMMA" in line:
            asked.setdefault(kernel, {})
        elif match := re.search(r"USETMAXREG\.(DEALLOC|TRY_ALLOC)\.CTAPOOL .*?0x(\w+)", line):
            of_kernel = asked.setdefault(kernel, {})
            assert of_kernel.setdefault(match[1], int(match[2], 16)) == int(match[2], 16), kernel
    assert bool(asked) == (row.arch == "sm90"), "the kernels with WGMMA have roles"
    used = {kernel: used for _, kernel, used in resources(row.name)}
    for kernel, of_kernel in asked.items():
        consumers = warps_of(row, kernel) // 4 - 1
        together = of_kernel["DEALLOC"] + consumers * of_kernel["TRY_ALLOC"]
        assert together <= (1 + consumers) * (-(-used[kernel]["REG"] // 8) * 8), kernel


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.arch == "sm90" and "bias" in row.score_mods],
    ids=lambda row: row.name,
)
def test_a_tile_of_the_bias_is_read_before_its_buffer_is_free(row):
    lines: dict[str, list[str]] = {}
    for _, kernel, line in instructions(row.name):
        lines.setdefault(kernel, []).append(line)
    for kernel, of_kernel in lines.items():
        assert under_way(of_kernel) == [], kernel


@pytest.mark.parametrize("source", ["append_tokens", "combine_splits"])
def test_kernels_that_every_library_has_do_not_spill(source):
    objects = list(BUILD.rglob(f"{source}.cu.o"))
    assert objects
    for path in objects:
        used = re.findall(r"STACK:(\d+).* LOCAL:(\d+)", cuobjdump("--dump-resource-usage", path))
        assert set(used) == {("0", "0")}, path


@each_row
def test_shared_memory_is_as_computed(row):
    beside_tiles = loaded_rows()[row.name]["shared_memory_bytes"] - tile_bytes(row)
    assert 0 <= beside_tiles <= BOOKKEEPING[row.arch, row.direction]
    # All shared memory is dynamic, but for the sums of a leftover key, of eight warps. From sm_90
    # on ptxas also counts 1 KB of each CTA for the system.
    of_key = 8 * 4 * (row.head_dim + row.head_dim_v)
    for chip, kernel, used in resources(row.name):
        static = 1024 if int(re.sub(r"\D", "", chip)) >= 90 else 0
        static += of_key if "16backward_prepareI" in kernel and "ELb1E" in kernel else 0
        assert used["SHARED"] == static, (chip, kernel)


@each_row
def test_library_reports_the_table(row):
    reported = loaded_rows()[row.name]
    columns = [field.name for field in dataclasses.fields(rows.Columns)]
    expected = {name: getattr(row, name) for name in columns}
    expected["score_mods"] = list(row.score_mods)  # JSON has no tuples
    assert {name: reported[name] for name in columns} == expected
    assert reported["threads"] == row.warps * 32


@each_row
def test_instructions(row):
    sass = "\n".join(line for *_, line in instructions(row.name))
    opcodes = set(re.findall(r"\b([A-Z][A-Z0-9]+)(?:\.[A-Z0-9_.]+)?\b", sass))
    assert set(INSTRUCTIONS[row.arch]) <= opcodes
    assert not {"LDL", "STL"} & opcodes, "registers spilled to local memory"


def test_sm80_kernels_carry_ptx_for_newer_chips():
    names = [row.name for row in ROWS if row.arch == "sm80"]
    for name in names:
        lowest = min(int(chip.removeprefix("sm_")) for chip, _, _ in resources(name))
        ptx = cuobjdump("--list-ptx", OBJECTS[name])
        assert re.findall(r"\.(sm_\d+)\.ptx", ptx) == ["sm_80" if lowest < 90 else "sm_90"]


def test_backward_adds_four_floats_at_once_from_sm_90_on():
    names = [row.name for row in ROWS if (row.arch, row.direction) == ("sm80", "backward")]
    for name in names:
        for chip, _, line in instructions(name):
            if "RED.E.ADD.F32" in line or "REDG.E.ADD.F32" in line:
                assert ("ADD.F32x4" in line) == (chip >= 90), line
