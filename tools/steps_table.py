"""Writes the table, the chart and the explanations of docs/steps.md.

python tools/steps_table.py [steps.json]

steps.json is a result file of `bench steps`; without one only the explanations are renewed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import readme_section
import result_file

from cute_attention.bench.optimisation_chart import plot_steps
from cute_attention.bench.optimisation_report import explanations, markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "steps.md"


def main(arguments: list[str]) -> None:
    readme_section.replace("explanations", explanations(), PAGE)
    if arguments:
        rows, machine = result_file.read(Path(arguments[0]), "steps")
        readme_section.replace("figures", markdown(rows, machine), PAGE)
        plot_steps(PAGE.parent / "images" / "steps.png", rows, machine)


if __name__ == "__main__":
    main(sys.argv[1:])
