"""Writes the figures and the chart of docs/experiments.md.

python tools/experiments_page.py experiments.json

experiments.json is a result file of `bench experiments`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import readme_section

from cute_attention.bench.experiments_report import markdown, plot_experiments
from cute_attention.bench.results import read_json

PAGE = Path(__file__).resolve().parents[1] / "docs" / "experiments.md"


def main(file: Path) -> None:
    results = read_json(file)
    if results.kind != "experiments":
        raise SystemExit(f"{file} is a file of {results.kind}, expected one of experiments")
    machine = results.environment["device"]
    readme_section.replace("figures", markdown(results.rows, machine), PAGE)
    plot_experiments(PAGE.parent / "images" / "experiments.png", results.rows, machine)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
