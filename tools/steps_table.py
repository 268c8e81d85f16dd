"""Writes the table, the chart and the explanations of docs/steps.md.

python tools/steps_table.py [steps.json]

steps.json is a result file of `bench steps`; without one only the explanations are renewed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import readme_section

from cute_attention.bench.optimisation_chart import plot_steps
from cute_attention.bench.optimisation_report import explanations, markdown
from cute_attention.bench.results import read_json

PAGE = Path(__file__).resolve().parents[1] / "docs" / "steps.md"


def main(arguments: list[str]) -> None:
    readme_section.replace("explanations", explanations(), PAGE)
    if arguments:
        results = read_json(Path(arguments[0]))
        if results.kind != "steps":
            raise SystemExit(f"{arguments[0]} is a file of {results.kind}, expected one of steps")
        machine = results.environment["device"]
        readme_section.replace("figures", markdown(results.rows, machine), PAGE)
        plot_steps(PAGE.parent / "images" / "steps.png", results.rows, machine)


if __name__ == "__main__":
    main(sys.argv[1:])
