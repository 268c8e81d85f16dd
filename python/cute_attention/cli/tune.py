"""`tune`: looks for rows that are faster than those of the tables."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench.options import add_shapes, choices
from ..errors import BuildError
from .numbers import chips, positive, positive_float
from .subcommands import missing_of

DESCRIPTION = """\
Looks for a faster row: candidates from the ranges of the columns, without those that the layout lab
refuses, in the order of their estimated times; compiled side by side; tried against attention in
float64; measured in turn with the present row and the peers, with an empty L2 cache; and a verdict
with the line for the .def file. A candidate replaces the row if it is more than 1 % faster on the
mean of the points and nowhere more than 1 % slower.

Without a GPU it compiles and says how to measure; without nvcc it measures what is compiled. A run
that was cut off goes on where it was, by the same command.
"""

EPILOG = """\
examples:
  python -m cute_attention tune --head-dims 128 --seqlens 512,4096 --direction fwd --minutes 20
  # compile here, measure there
  python -m cute_attention tune --arch sm90 --head-dims 64 --seqlens 197 --batch 64 --heads 12 \\
      --masks full --build-only --output tuned
  python -m cute_attention tune --measure-only --input tuned --plot tuned.png
  # rows of your own, before those that are found
  python -m cute_attention tune --arch sm80 --head-dims 64 --direction bwd \\
      --row tile_m=32,tile_n=64 --row tile_m=64,tile_n=64,stages=1 --candidates 4

docs/tuning.md tells more.
"""

REQUIRES = ("matplotlib", "pynvml", "rich")


def _row(text: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for word in text.split(","):
        column, _, value = word.partition("=")
        if not column or not value:
            raise argparse.ArgumentTypeError(f"{word!r} is not COLUMN=VALUE")
        values[column] = int(value) if value.isdigit() else value
    return values


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shapes(parser)
    group = parser.add_argument_group("what is searched")
    group.add_argument(
        "--direction",
        type=choices(("fwd", "bwd")),
        default=["fwd"],
        metavar="fwd,bwd",
        help="default: fwd",
    )
    group.add_argument(
        "--arch", choices=("sm80", "sm90"), help="default: the GPU's own; sm80 where there is none"
    )
    group.add_argument(
        "--minutes",
        type=positive_float,
        default=20.0,
        help="to compile and measure in; default: 20",
    )
    group.add_argument(
        "--candidates",
        type=positive,
        metavar="N",
        help="rows to compile for each row of the tables; default: as many as the minutes allow",
    )
    group.add_argument(
        "--row",
        type=_row,
        action="append",
        default=[],
        metavar="COLUMN=VALUE,...",
        help="a candidate of your own, as changes of the present row; may be repeated",
    )
    group.add_argument(
        "--chips", type=chips, metavar="80,90", help="of sm80 rows; default: this machine's, or 80"
    )
    group = parser.add_argument_group("how it is compiled and measured")
    stages = group.add_mutually_exclusive_group()
    stages.add_argument("--build-only", action="store_true", help="compile, and measure nothing")
    stages.add_argument("--measure-only", action="store_true", help="measure what --input holds")
    group.add_argument(
        "--output",
        "--input",
        dest="folder",
        type=Path,
        default=Path("tuned"),
        metavar="DIR",
        help="the folder of the search: libraries, manifest, results; default: tuned",
    )
    group.add_argument("--jobs", type=positive, metavar="N", help="compilers at a time")
    group.add_argument(
        "--peers", metavar="NAMES", help="contenders of `bench` to set beside; '' for none"
    )
    group.add_argument("--rounds", type=positive, default=5, help="turns of each; default: 5")
    group.add_argument(
        "--time-ms", type=positive_float, default=50.0, help="per contender and round; default: 50"
    )
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="speed over the present row's")
    return parser


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m cute_attention tune"
) -> int:
    """Tunes; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = make_parser(prog).parse_args(words)
    if missing := missing_of(REQUIRES, "bench"):
        print(f"{prog}: {missing}", file=sys.stderr)
        return 1
    command = importlib.import_module("cute_attention.tune.command")
    try:
        code: int = command.run(args, words)
    except (BuildError, ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return code
