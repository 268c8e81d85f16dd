"""Writes the table of docs/tuning.md: what searches of `tune` have found of the rows of the tables.

python tools/tuned_table.py FOLDER...

Each folder is that of a search, with the results of one GPU, the same in all. Lines of the page
that are of other searches stay: those of another row of the tables, or another number of points.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import readme_section

from cute_attention.bench.results import read_json
from cute_attention.tune import folder as folders
from cute_attention.tune.show import markdown
from cute_attention.tune.verdict import Verdict, verdict_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tuning.md"


def verdicts_of(path: Path) -> tuple[list[Verdict], str]:
    """The verdicts of a folder, and the GPU that its candidates were measured on."""
    files = sorted(path.glob("results_*.json"))
    if len(files) != 1:
        raise SystemExit(f"{path} has results of {len(files)} GPUs, expected 1")
    results = read_json(files[0])
    machine = results.environment["device"]
    found = folders.read(path)
    faults = {name: fault for name, fault in found.trials(machine).items() if fault}
    return [verdict_of(search, results.rows, faults) for search in found.searches], machine


def merged(old: str, new: str) -> str:
    """The table `new` and the lines of `old` about other searches, in the order of their rows."""
    (before, older), (above, lines) = (_parts(text) for text in (old, new))
    if older and before != above:
        raise SystemExit(f"the page has a table of another GPU: {before.splitlines()[0]}")
    found = {_search(line) for line in lines}
    kept = [line for line in older if _search(line) not in found]
    return "\n".join([above, *sorted(kept + lines, key=_search), ""])


def _parts(text: str) -> tuple[str, list[str]]:
    """What stands above the lines of a table, and these."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("| `")), len(lines))
    return "\n".join(lines[:first]), lines[first:]


def _search(line: str) -> tuple[str, int]:
    """The row of the tables and the number of points, which tell searches apart."""
    _, row, points, *_ = line.split("|")
    return row, int(points)


def main(paths: Sequence[Path]) -> None:
    verdicts: list[Verdict] = []
    machines = set()
    for path in paths:
        own, machine = verdicts_of(path)
        verdicts += own
        machines.add(machine)
    if len(machines) != 1:
        raise SystemExit(f"the folders have results of {len(machines)} GPUs, expected 1")
    new = markdown(verdicts, machines.pop())
    readme_section.replace("verdicts", merged(readme_section.read("verdicts", PAGE), new), PAGE)


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit("expected the folder of a search, or several")
    main([Path(name) for name in sys.argv[1:]])
