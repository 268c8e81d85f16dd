"""Writes the table of docs/tuning.md: what searches of `tune` have found of the rows of the tables.

python tools/tuned_table.py FOLDER...

Each folder is that of a search, with the results of one GPU, the same in all.
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


def main(paths: Sequence[Path]) -> None:
    verdicts: list[Verdict] = []
    machines = set()
    for path in paths:
        own, machine = verdicts_of(path)
        verdicts += own
        machines.add(machine)
    if len(machines) != 1:
        raise SystemExit(f"the folders have results of {len(machines)} GPUs, expected 1")
    readme_section.replace("verdicts", markdown(verdicts, machines.pop()), PAGE)


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit("expected the folder of a search, or several")
    main([Path(name) for name in sys.argv[1:]])
