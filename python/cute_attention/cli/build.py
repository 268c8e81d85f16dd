"""`build`: a row compiled from the command line, as `rows.Row.build` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import BuildError
from ..native import kernel_cache
from ..rows.row import Row
from .numbers import chips

EPILOG = """\
examples:
  # the row with the headers in my/include, which are found before the package's own
  python -m cute_attention build sm80_fwd_bf16_d64 --include my/include
  # a column for study: what the swizzle is worth (docs/rows.md lists them)
  python -m cute_attention build sm80_fwd_bf16_d128 --set swizzle=0 --out kernels
  # a row that does not exist yet, as a plug-in in the folder kernels/
  python -m cute_attention build sm80_fwd_bf16_d64 --set tile_n=128 --out kernels
  CUTE_ATTENTION_KERNEL_PATH=kernels python -m cute_attention info

docs/rows.md tells more.
"""


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compiles one kernel with nvcc, which takes about a minute, and keeps it in "
        "the cache. No GPU is needed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("row", metavar="ROW", help="a row of src/kernels/*.def")
    parser.add_argument(
        "--set", action="append", default=[], metavar="COLUMN=VALUE", help="edit the row"
    )
    parser.add_argument(
        "--include", type=Path, metavar="DIR", help="headers found before the project's own"
    )
    parser.add_argument(
        "--source", type=Path, metavar="FILE", help="in place of the header of the launch class"
    )
    parser.add_argument(
        "--chips",
        type=chips,
        metavar="80,90",
        help="of an sm80 row; default: this machine's, or 80",
    )
    parser.add_argument(
        "--check", action="store_true", help="prove the layouts first (the layout lab)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="copy the library there: a plug-in")
    return parser


def _edited(name: str, changes: Sequence[str]) -> Row:
    values: dict[str, object] = {}
    for change in changes:
        column, _, value = change.partition("=")
        values[column] = int(value) if value.isdigit() else value
        if column == "score_mods":
            values[column] = [word for word in value.split("|") if word]
    try:
        return Row.of(name, **values)
    except TypeError as error:  # a word in place of a number
        raise ValueError(f"--set: {error}") from error


def _build(args: argparse.Namespace) -> None:
    row = _edited(args.row, args.set)
    if args.check:
        reports = row.check(include=args.include)
        print(f"{row.name}: {sum(len(report.results) for report in reports)} proofs hold")
    kernel = row.build(include=args.include, source=args.source, chips=args.chips)
    print(
        f"{kernel.name}: tile {kernel.tile_m} x {kernel.tile_n}, {kernel.stages} stages, "
        f"{kernel.warps} warps, {kernel.shared_memory_bytes / 1024:g} KB shared memory"
    )
    if args.out:
        print(kernel_cache.copy_of(kernel.name, args.out))
    else:
        print(*kernel_cache.folder().glob(f"{kernel.name}-*.so"))


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m cute_attention build"
) -> int:
    """Builds a row; returns the exit code."""
    args = make_parser(prog).parse_args(arguments)
    try:
        _build(args)
    except (BuildError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0
