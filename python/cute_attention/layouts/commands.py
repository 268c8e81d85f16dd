"""The subcommands of the layout lab: what each does with its options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ..native import rows
from . import checks, diff, ncu, path, show
from .errors import LayoutError
from .export import Request, described, edited, find_row
from .model import Kernel, kernels


def _requests(names: Sequence[str], args: argparse.Namespace) -> list[Request]:
    """The rows of these names, as the options edit them."""
    if args.include is not None and not args.include.is_dir():
        raise LayoutError(f"--include: {args.include} is not a folder")
    wanted = [find_row(name) for name in names]
    if args.set:
        wanted = [edited(row, args.set) for row in wanted]
    return [Request(row, include=args.include) for row in wanted]


def _one(name: str, args: argparse.Namespace) -> Kernel:
    return kernels(_requests([name], args))[0]


def run_check(args: argparse.Namespace) -> int:
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


def run_show(args: argparse.Namespace) -> int:
    for file in show.show(_one(args.row_name, args), args.out):
        print(file)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    if args.other is None and not args.set:
        raise LayoutError("diff: name a second row, or change columns of the first with --set")
    first = kernels([Request(find_row(args.row_name), include=None)])[0]
    second = _one(args.other or args.row_name, args)
    print(diff.numbers(first, second))
    if args.out:
        print(diff.picture(first, second, args.out))
    return 0


def run_explain(args: argparse.Namespace) -> int:
    kernel = _one(args.row_name, args)
    element = path.element_of(args.tensor, args.row, args.col)
    print(path.words(kernel, element))
    if args.out:
        for file in path.pictures(kernel, element, args.out):
            print(file)
    return 0


def run_export(args: argparse.Namespace) -> int:
    kernel = _one(args.row_name, args)
    fields = ("plan", "roles", "copies", "products")
    print(json.dumps({field: getattr(kernel, field) for field in fields}, indent=1))
    return 0


RUN = {
    "check": run_check,
    "show": run_show,
    "diff": run_diff,
    "explain": run_explain,
    "export": run_export,
}
