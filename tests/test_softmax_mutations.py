"""Broken softmaxes are caught: tests/cpp/test_softmax.cpp fails for every mutation of its headers.

All mutations are compiled into one program, each where the original stands; the environment says
which of them takes its place.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from cute_attention.layouts import export

# Compiles a large program, as the tests of layouts do: not at the same time.
pytestmark = pytest.mark.xdist_group("layouts")

CORE = Path("cute_attention") / "core"
SELECTED = "CUTE_ATTENTION_MUTATION"


@dataclass(frozen=True)
class Mutation:
    """A piece of a header and what takes its place; both expressions, or both statements."""

    name: str
    original: str
    mutant: str
    after: str = ""  # the text that follows the piece, where it alone is not unique


LOOP = "; ++row) {\n"
LAG = "fminf(fmaxf(log2f(row_sum(row)), 0.f), float(kMostLag))"
FACTOR = "reference(row) > old ? exp2f(-rise) : 1.f"
MINIMUM = "exp2f(fminf(-rise, 0.f))"
SUM = "col == 0 ? value : sums(row) + value"
PARTIAL = "col < 2 ? value : partial[col % 2] + value"
ROW = [
    Mutation("row without LSE", "kRows", "kRows - 1", LOOP + "      bool const empty ="),
    Mutation("row without P", "kRows", "kRows - 1", LOOP + "        float const value ="),
    Mutation("row not lowered", "kRows", "kRows - 1", LOOP + "      bool const usual ="),
    Mutation("row not looked at", "kRows", "kRows - 1", LOOP + "      unusual |="),
    Mutation("-infinity not guarded", "usual || reference(row) == -INFINITY", "usual"),
    Mutation("large references kept", "fabsf(base) <= kLargest", "fabsf(base) < INFINITY"),
    Mutation("large references not looked for", "unusual |= !is_usual(bases(row));", ";"),
    Mutation("large references not subtracted", "scores(row, col) -= seen;", ";"),
    Mutation("base kept", "usual ? shifted(row) : 0.f", "shifted(row)"),
    Mutation("sum of one column", SUM, "value"),
    Mutation("sums of the first attempt kept", SUM, "sums(row) + value"),
    Mutation("row by row: row without P", "kRows", "kRows - 1", LOOP + "      float partial[2]"),
    Mutation("row by row: sum of one column", PARTIAL, "value"),
    Mutation("row by row: one of two sums", "partial[0] + partial[1]", "partial[0]"),
    Mutation("sums not added", "row_sum(row) += sums(row);", ";"),
    Mutation("sums of the last tile", "row_sum(row) += sums(row);", "row_sum(row) = sums(row);"),
    Mutation(
        "sum of one thread", "reduce_row_threads<Warp>(row_sum(row), SumOp{})", "row_sum(row)"
    ),
    Mutation("sums of other warps ignored", "combine(sums, SumOp{});", ";"),
    Mutation("row without keys divided", "sums(row) == 0.f", "false"),
    Mutation("rise of a base that is none", "is_usual(old_base) && is_usual(base)", "true"),
]
ONLINE = [
    Mutation("no vote on new references", "Warp::any(grows)", "grows"),
    Mutation("factor not written by take", "1.f", "NAN", ";\n        row_sum"),
    Mutation("row without factor", "kRows", "kRows - 1", LOOP + "        bool const grown ="),
    Mutation("negative scores in the order of others", "negative |= most[row] < 0;", ";"),
    Mutation(
        "other scores in the order of negative ones", "most[row] < 0 ? least : most[row]", "least"
    ),
    Mutation("maximum of every other column", "bits(scores(row, col + 1))", "0"),
    Mutation("maximum of one chain", "extreme(chains[0], chains[1], chains[1])", "chains[0]"),
    Mutation("sum not scaled by take", "row_sum(row) *= factors(row);", ";"),
    Mutation(
        "maximum of one thread",
        "reduce_row_threads<Warp>(maxima(row), MaxOp{})",
        "maxima(row)",
    ),
    Mutation("lag of one thread", "reduce_row_threads<Warp>(lag(row), MinOp{})", "lag(row)"),
    Mutation("lag whatever the sum", LAG, "float(kMostLag)"),
    Mutation("lag without limit", LAG, "fmaxf(log2f(row_sum(row)), 0.f)"),
    Mutation("maxima of other warps ignored", "combine(maxima, MaxOp{});", ";"),
    Mutation("reference kept", "grown ? maxima(row) : old", "old"),
    Mutation("reference replaced by less", "grown ? maxima(row) : old", "maxima(row)"),
]
STRAIGHT = [
    Mutation("straight: row not raised", "kRows", "kRows - 1", LOOP + "      float const old ="),
    Mutation(
        "straight: maximum of one thread",
        "reduce_row_threads<Warp>(maxima(row), MaxOp{})",
        "maxima(row)",
    ),
    Mutation("straight: reference replaced by less", "fmaxf(old, maximum)", "maximum"),
    Mutation("straight: reference kept", "fmaxf(old, maximum)", "old"),
    Mutation("straight: factor forgotten", FACTOR, "1.f"),
    Mutation("straight: factor where nothing rises", FACTOR, "exp2f(-rise)"),
    Mutation("straight: factor of hidden scores", MINIMUM, "exp2f(-rise)"),
    Mutation("straight: minimum forgotten", MINIMUM, "1.f"),
    Mutation("straight: sum not scaled", "row_sum(row) *= factors(row);", ";"),
]
HEADERS = {
    "row_softmax.h": ROW,
    "online_softmax.h": ONLINE,
    "straight_softmax.h": STRAIGHT,
}
MUTATIONS = [*ROW, *ONLINE, *STRAIGHT]


def _choice(original: str, mutants: dict[int, str]) -> str:
    """C++ that stands for `original` unless one of the mutations is selected."""
    result = original
    for number, mutant in mutants.items():
        if original.endswith(";"):
            result = f"if (mutation == {number}) {{ {mutant} }} else {{ {result} }}"
        else:
            result = f"(mutation == {number} ? ({mutant}) : ({result}))"
    return result


def _mutated(text: str, mutations: list[Mutation]) -> str:
    """A header with a choice between each piece and its mutants."""
    pieces: dict[tuple[int, str], dict[int, str]] = {}
    for mutation in mutations:
        number = MUTATIONS.index(mutation) + 1
        whole = mutation.original + mutation.after
        assert text.count(whole) == 1, f"{mutation.name}: the header has not one {whole!r}"
        place = (text.index(whole), mutation.original)
        pieces.setdefault(place, {})[number] = mutation.mutant
    for (begin, original), mutants in sorted(pieces.items(), reverse=True):
        end = begin + len(original)
        text = text[:begin] + _choice(original, mutants) + text[end:]
    return text.replace("#pragma once\n", '#pragma once\n#include "mutation.h"\n', 1)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The test program of the softmax, with all mutations in it."""
    folder = tmp_path_factory.mktemp("softmax")
    root = export.sources()
    (folder / "mutation.h").write_text(
        "#pragma once\n#include <cstdlib>\n"
        f'inline int const mutation = std::atoi(std::getenv("{SELECTED}"));\n'
    )
    (folder / CORE).mkdir(parents=True)
    for name, mutations in HEADERS.items():
        text = (root / "include" / CORE / name).read_text()
        (folder / CORE / name).write_text(_mutated(text, mutations))
    source = root / "tests" / "cpp" / "test_softmax.cpp"
    flags = ["-std=c++17", "-O1", "-w", "-UNDEBUG", "-fno-strict-aliasing"]
    flags += [f"-I{path}" for path in (folder, root / "include", root / "src")]
    command = [export._compiler(), *flags, *export._include_flags(), str(source)]
    compiled = subprocess.run(
        [*command, "-o", str(folder / "test_softmax")], capture_output=True, text=True
    )
    assert compiled.returncode == 0, compiled.stderr
    return folder / "test_softmax"


def _run(program: Path, number: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, SELECTED: str(number)}
    return subprocess.run(
        [str(program), "quick"], env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_headers_pass(program):
    result = _run(program, 0)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "number", range(1, len(MUTATIONS) + 1), ids=[mutation.name for mutation in MUTATIONS]
)
def test_a_mutation_fails(program, number):
    result = _run(program, number)
    assert result.returncode == 1, f"{result.stdout}{result.stderr}"
    assert "FAILED" in result.stderr
