"""`cache`: the kernels that `rows.Row.build` and the environment variable CUTE_ATTENTION_JIT have
compiled."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from ..errors import BuildError
from ..native import kernel_cache


def listing() -> Iterator[str]:
    """The lines of `cache list`."""
    found = kernel_cache.entries()
    limit = kernel_cache.size_limit()
    total = sum(entry.bytes for entry in found)
    yield f"{kernel_cache.folder()}: {len(found)} kernels, {_size(total)} of {_size(limit)}"
    for entry in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        yield f"  {entry.row}  {_size(entry.bytes)}, used {used}, {entry.path.name}"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MB"


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Shows or removes the kernels that were compiled from Python.",
        epilog="CUTE_ATTENTION_CACHE names another folder, CUTE_ATTENTION_CACHE_SIZE the bytes it "
        "may hold. A process that has loaded a kernel keeps it.",
    )
    parser.add_argument(
        "action", nargs="?", choices=("list", "clear"), default="list", help="default: list"
    )
    return parser


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m cute_attention cache"
) -> int:
    """Lists or clears the cache; returns the exit code."""
    args = make_parser(prog).parse_args(arguments)
    try:
        if args.action == "list":
            print("\n".join(listing()))
        else:
            removed = kernel_cache.clear()
            total = _size(sum(entry.bytes for entry in removed))
            print(f"{kernel_cache.folder()}: removed {len(removed)} kernels, {total}")
    except BuildError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0
