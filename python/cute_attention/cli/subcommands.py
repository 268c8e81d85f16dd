"""What `bench` and `layouts` share: subcommands whose help needs no extra of the package."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommands:
    """A command with subcommands.

    The parser stores the name of the subcommand as `command`. `module`, which may import what only
    the extra brings, has a table `RUN` from that name to a function of the parsed arguments that
    returns the exit code.
    """

    extra: str
    requires: tuple[str, ...]  # modules that the extra brings
    module: str
    mistakes: tuple[type[Exception], ...]  # what `module` raises where the user is mistaken
    hint: str = ""  # about installing the extra

    def run(self, parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
        """Parses the arguments and runs the subcommand they name; without one, prints the help."""
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help()
            return 0
        if missing := missing_of(self.requires, self.extra, self.hint):
            print(f"{parser.prog}: {missing}", file=sys.stderr)
            return 1
        run = importlib.import_module(self.module).RUN[args.command]
        try:
            code: int = run(args)
        except self.mistakes as error:
            print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
            return 2
        return code


def missing_of(modules: Sequence[str], extra: str, hint: str = "") -> str:
    """Which of an extra's modules cannot be imported and what installs it; "" where all can."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            return f'{error}: pip install "cute-attention[{extra}]" adds it{hint}'
    return ""
