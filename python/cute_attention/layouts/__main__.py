"""python -m cute_attention.layouts: check, show, diff, explain, export."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    import matplotlib  # noqa: F401
    import numpy  # noqa: F401
    import pycute  # noqa: F401
except ModuleNotFoundError as error:
    sys.exit(
        f"{error}: the layout lab needs its extra, `pip install cute-attention[layouts]`; of it, "
        "nvidia-cutlass==4.2.0.0 will do without its dependencies (pip install --no-deps)"
    )

from cute_attention.layouts import checks, diff, ncu, path, show
from cute_attention.layouts.errors import LayoutError
from cute_attention.layouts.export import Request, described, edited, find_row
from cute_attention.layouts.model import Kernel, kernels
from cute_attention.native import rows

INTRODUCTION = """\
Shows, proves and compares the layouts that the kernels compile with. No GPU is needed.
"""

EPILOGUE = """\
examples:
  # every proof about every row; exit code 1 where one does not hold
  python -m cute_attention.layouts check
  # a row that does not exist yet
  python -m cute_attention.layouts check sm80_fwd_bf16_d128 --set tile_n=96
  # headers of your own, found before the project's
  python -m cute_attention.layouts check sm80_fwd_bf16_d128 --include my/include
  # pictures (SVG and PNG) and one page to click through
  python -m cute_attention.layouts show sm80_fwd_bf16_d128 --out pictures
  python -m cute_attention.layouts diff sm80_fwd_bf16_d128 sm80_fwd_bf16_d64
  python -m cute_attention.layouts explain sm80_fwd_bf16_d128 --row 5 --col 40

A tutorial: docs/changing_a_layout.md. What the rules mean: docs/layouts.md
"""


def _requests(names: Sequence[str], args: argparse.Namespace) -> list[Request]:
    wanted = [find_row(name) for name in names]
    if args.set:
        wanted = [edited(row, args.set) for row in wanted]
    return [Request(row, include=args.include) for row in wanted]


def _one(name: str, args: argparse.Namespace) -> Kernel:
    return kernels(_requests([name], args))[0]


def _check(args: argparse.Namespace) -> int:
    undescribed = []
    if args.rows:
        wanted = _requests(args.rows, args)
    else:
        table = rows.table()
        undescribed = [row.name for row in table if not described(row)]
        wanted = _requests([row.name for row in table if described(row)], args)
    reports = checks.check_all(kernels(wanted))
    if args.json:
        args.json.write_text(json.dumps(checks.as_json(reports), indent=1) + "\n")
    print(checks.report(reports, verbose=args.verbose or len(reports) == 1))
    if undescribed:
        print(f"not described, so not checked: {', '.join(undescribed)}")
    measured = None
    if args.ncu or args.counters:
        measured = ncu.compare(reports, args.counters)
    if measured is not None:
        print(measured.text)
    bad = any(report.violations for report in reports)
    return int(bad or (measured is not None and not measured.agrees))


def _show(args: argparse.Namespace) -> int:
    for file in show.show(_one(args.row_name, args), args.out):
        print(file)
    return 0


def _diff(args: argparse.Namespace) -> int:
    if args.other is None and not args.set:
        raise LayoutError("diff: name a second row, or change columns of the first with --set")
    first = kernels([Request(find_row(args.row_name), include=None)])[0]
    second = _one(args.other or args.row_name, args)
    print(diff.numbers(first, second))
    if args.out:
        print(diff.picture(first, second, args.out))
    return 0


def _explain(args: argparse.Namespace) -> int:
    kernel = _one(args.row_name, args)
    element = path.element_of(args.tensor, args.row, args.col)
    print(path.words(kernel, element))
    if args.out:
        for file in path.pictures(kernel, element, args.out):
            print(file)
    return 0


def _export(args: argparse.Namespace) -> int:
    kernel = _one(args.row_name, args)
    fields = ("plan", "roles", "copies", "products")
    print(json.dumps({field: getattr(kernel, field) for field in fields}, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m cute_attention.layouts",
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
    commands = parser.add_subparsers(required=True, metavar="command")

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
    check.set_defaults(run=_check)

    show_ = commands.add_parser("show", parents=[common], help="draw a kernel")
    show_.add_argument("row_name", metavar="ROW")
    show_.add_argument("--out", type=Path, default=Path("layouts"), metavar="DIR")
    show_.set_defaults(run=_show)

    diff_ = commands.add_parser("diff", parents=[common], help="compare two kernels")
    diff_.add_argument("row_name", metavar="ROW")
    diff_.add_argument("other", nargs="?", metavar="ROW_B", help="default: ROW as --set edits it")
    diff_.add_argument("--out", type=Path, metavar="DIR", help="draw them side by side, too")
    diff_.set_defaults(run=_diff)

    explain = commands.add_parser("explain", parents=[common], help="follow one element")
    explain.add_argument("row_name", metavar="ROW")
    explain.add_argument("--tensor", default="q", help="q, k, v, o, do, dq, ...; default: q")
    explain.add_argument("--row", type=int, default=0, metavar="I", help="in the tile; default: 0")
    explain.add_argument("--col", type=int, default=0, metavar="D", help="default: 0")
    explain.add_argument("--out", type=Path, metavar="DIR", help="draw the path, too")
    explain.set_defaults(run=_explain)

    export_ = commands.add_parser("export", parents=[common], help="print the exported JSON")
    export_.add_argument("row_name", metavar="ROW")
    export_.set_defaults(run=_export)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    args = _parser().parse_args(arguments)
    if args.include is not None and not args.include.is_dir():
        print(f"--include: {args.include} is not a folder", file=sys.stderr)
        return 2
    try:
        return args.run(args)
    except LayoutError as error:
        print(f"cute_attention.layouts: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
