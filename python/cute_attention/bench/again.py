"""The command line that measures a row again; every row of results carries it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

import torch

from .points import Point


def again(
    subcommand: str, point: Point, device: torch.device, **options: str | Iterable[str]
) -> str:
    """The shell command that runs a subcommand of the benchmark at one point, with its options by
    their names on the command line (`time_ms` is `--time-ms`). An option with several values is
    given once for each."""
    words = ["python", "-m", "cute_attention", "bench", subcommand, *point.arguments()]
    for name, value in options.items():
        for each in [value] if isinstance(value, str) else value:
            words += [f"--{name.replace('_', '-')}", each]
    if device.type == "cpu":
        words += ["--device", "cpu"]
    return shlex.join(words)
