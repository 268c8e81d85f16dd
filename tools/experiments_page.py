"""Writes the figures and the chart of docs/experiments.md.

python tools/experiments_page.py experiments.json

experiments.json is a result file of `bench experiments`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import readme_section
import result_file

from cute_attention.bench.experiments_report import markdown, plot_experiments

PAGE = Path(__file__).resolve().parents[1] / "docs" / "experiments.md"


def main(file: Path) -> None:
    rows, machine = result_file.read(file, "experiments")
    readme_section.replace("figures", markdown(rows, machine), PAGE)
    plot_experiments(PAGE.parent / "images" / "experiments.png", rows, machine)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
