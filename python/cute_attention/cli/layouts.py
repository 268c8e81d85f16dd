"""`layouts`: its subcommands, their options, and the text that teaches them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..layouts.errors import LayoutError
from .subcommands import Subcommands

INTRODUCTION = """\
Shows, proves and compares the layouts that the kernels compile with. No GPU is needed.
"""

EPILOGUE = """\
examples:
  # every proof about every row; exit code 1 where one does not hold
  python -m cute_attention layouts check
  # a row that does not exist yet
  python -m cute_attention layouts check sm80_fwd_bf16_d128 --set tile_n=96
  # headers of your own, found before the project's
  python -m cute_attention layouts check sm80_fwd_bf16_d128 --include my/include
  # pictures (SVG and PNG) and one page to click through
  python -m cute_attention layouts show sm80_fwd_bf16_d128 --out pictures
  python -m cute_attention layouts diff sm80_fwd_bf16_d128 sm80_fwd_bf16_d64
  python -m cute_attention layouts explain sm80_fwd_bf16_d128 --row 5 --col 40
  # one of the two kernels of a row; ROW means both
  python -m cute_attention layouts show sm90_bwd_bf16_d256/grad_kv

A tutorial: docs/changing_a_layout.md. What the rules mean: docs/layouts.md
"""

_RUNNER = Subcommands(
    extra="layouts",
    requires=("matplotlib", "numpy", "pycute"),
    module="cute_attention.layouts.commands",
    mistakes=(LayoutError,),
    hint=(
        "; of it, nvidia-cutlass==4.2.0.0 will do without its dependencies (pip install --no-deps)"
    ),
)


def make_parser(prog: str = "python -m cute_attention layouts") -> argparse.ArgumentParser:
    """The parser of the layout lab's command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=prog,
        description=INTRODUCTION,
        epilog=EPILOGUE,
        formatter_class=raw,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--set", action="append", default=[], metavar="COLUMN=VALUE", help="edit the row"
    )
    common.add_argument(
        "--include", type=Path, metavar="DIR", help="headers found before the project's own"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    check = commands.add_parser("check", parents=[common], help="prove what must hold")
    check.add_argument("rows", nargs="*", metavar="ROW", help="default: every row")
    check.add_argument("--verbose", action="store_true", help="what holds, too")
    check.add_argument("--json", type=Path, metavar="FILE", help="all results, as JSON")
    check.add_argument(
        "--ncu", action="store_true", help="compare with Nsight Compute's counters (needs a GPU)"
    )
    check.add_argument(
        "--counters",
        type=Path,
        metavar="FILE.csv",
        help="like --ncu, with what `ncu --csv` printed on another machine (docs/layouts.md)",
    )

    show_ = commands.add_parser("show", parents=[common], help="draw a kernel")
    show_.add_argument("row_name", metavar="ROW")
    show_.add_argument("--out", type=Path, default=Path("layouts"), metavar="DIR")

    diff_ = commands.add_parser("diff", parents=[common], help="compare two kernels")
    diff_.add_argument("row_name", metavar="ROW")
    diff_.add_argument("other", nargs="?", metavar="ROW_B", help="default: ROW as --set edits it")
    diff_.add_argument("--out", type=Path, metavar="DIR", help="draw them side by side, too")

    explain = commands.add_parser("explain", parents=[common], help="follow one element")
    explain.add_argument("row_name", metavar="ROW")
    explain.add_argument("--tensor", default="q", help="q, k, v, o, do, dq, ...; default: q")
    explain.add_argument("--row", type=int, default=0, metavar="I", help="in the tile; default: 0")
    explain.add_argument("--col", type=int, default=0, metavar="D", help="default: 0")
    explain.add_argument("--out", type=Path, metavar="DIR", help="draw the path, too")

    export_ = commands.add_parser("export", parents=[common], help="print the exported JSON")
    export_.add_argument("row_name", metavar="ROW")
    return parser


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m cute_attention layouts"
) -> int:
    """Runs a subcommand of the layout lab and returns the exit code."""
    return _RUNNER.run(make_parser(prog), arguments)
