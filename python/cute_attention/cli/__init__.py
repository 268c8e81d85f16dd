"""The command line: `python -m cute_attention COMMAND`, or `cute-attention COMMAND`.

`COMMANDS` is the table of commands: a new one is a line there and a module with a function
`main(arguments, prog)` that returns the exit code. A module is imported when its command is asked
for, and none needs an extra of the package to print its help.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import cute_attention


@dataclass(frozen=True)
class Command:
    """One command: what the help says about it, and the module that runs it."""

    summary: str
    module: str


COMMANDS = {
    "info": Command("what is installed, and which backend serves what", "cute_attention.cli.info"),
    "bench": Command("measure attention beside its peers", "cute_attention.cli.bench"),
    "build": Command("compile a row of the tables, or one like it", "cute_attention.cli.build"),
    "tune": Command("look for faster rows than those of the tables", "cute_attention.cli.tune"),
    "cache": Command("list or clear the kernels that were built", "cute_attention.cli.cache"),
    "layouts": Command("show and prove the layouts of kernels", "cute_attention.cli.layouts"),
}


def _parser(prog: str) -> argparse.ArgumentParser:
    """Prints the list of commands and refuses unknown ones; the commands parse their own
    arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Exact attention for PyTorch on NVIDIA GPUs: tools around the package.",
        epilog=f"`{prog} COMMAND --help` tells what a command does.",
    )
    version = f"cute-attention {cute_attention.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "cute-attention") -> int:
    """Runs the command that the arguments name, those of the process by default; without a
    command, prints the help. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        command = importlib.import_module(COMMANDS[words[0]].module)
        code: int = command.main(words[1:], f"{prog} {words[0]}")
        return code
    parser = _parser(prog)
    parser.parse_args(words)
    parser.print_help()
    return 0
