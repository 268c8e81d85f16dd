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


def _of_part(found: list[Kernel], part: str) -> list[Kernel]:
    """Of the kernels of a row the one with this name, or all for ""."""
    named = [kernel for kernel in found if part in ("", kernel.part)]
    if not named:
        row, parts = found[0].row.name, [kernel.part for kernel in found if kernel.part]
        has = f"the kernels {', '.join(parts)}" if parts else "only one kernel, without a name"
        raise LayoutError(f"{row}/{part}: {row} has {has}")
    return named


def _kernels(names: Sequence[str], args: argparse.Namespace) -> list[Kernel]:
    """The kernels of rows, ROW, or single ones of them, ROW/KERNEL."""
    parts = [name.partition("/")[::2] for name in names]
    requests = _requests([row for row, _ in parts], args)
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels(dict.fromkeys(requests)):
        found.setdefault(kernel.row.name, []).append(kernel)
    return [
        kernel
        for request, (_, part) in zip(requests, parts, strict=True)
        for kernel in _of_part(found[request.row.name], part)
    ]


def run_check(args: argparse.Namespace) -> int:
    undescribed = []
    if args.rows:
        found = _kernels(args.rows, args)
    else:
        table = rows.table()
        undescribed = [row.name for row in table if not described(row)]
        found = kernels(_requests([row.name for row in table if described(row)], args))
    reports = checks.check_all(found)
    if args.json:
        args.json.write_text(json.dumps(checks.as_json(reports), indent=1) + "\n")
    print(checks.report(reports, verbose=args.verbose))
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
    for kernel in _kernels([args.row_name], args):
        for file in show.show(kernel, args.out):
            print(file)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    if args.other is None and not args.set:
        raise LayoutError("diff: name a second row, or change columns of the first with --set")
    row, _, part = args.row_name.partition("/")
    first = _of_part(kernels([Request(find_row(row), include=None)]), part)
    second = _kernels([args.other or args.row_name], args)
    if len(first) != len(second):
        names = [" and ".join(kernel.name for kernel in each) for each in (first, second)]
        raise LayoutError(f"diff: compare kernel with kernel; named are {' with '.join(names)}")
    for old, new in zip(first, second, strict=True):
        print(diff.numbers(old, new))
        if args.out:
            print(diff.picture(old, new, args.out))
    return 0


def run_explain(args: argparse.Namespace) -> int:
    element = path.element_of(args.tensor, args.row, args.col)
    for kernel in _kernels([args.row_name], args):
        print(path.words(kernel, element))
        if args.out:
            for file in path.pictures(kernel, element, args.out):
                print(file)
    return 0


def run_export(args: argparse.Namespace) -> int:
    fields = ("plan", "roles", "copies", "products")
    found = {
        kernel.part: {field: getattr(kernel, field) for field in fields}
        for kernel in _kernels([args.row_name], args)
    }
    print(json.dumps(found if len(found) > 1 else next(iter(found.values())), indent=1))
    return 0


RUN = {
    "check": run_check,
    "show": run_show,
    "diff": run_diff,
    "explain": run_explain,
    "export": run_export,
}
