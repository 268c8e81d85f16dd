"""`bench`: its subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import BuildError
from ..layouts.errors import LayoutError
from . import bench_options as options
from . import bench_texts as texts
from .subcommands import Subcommands


@dataclass(frozen=True)
class _Subcommand:
    """A subcommand of the benchmark, as its help shows it."""

    summary: str
    description: str
    examples: str
    add_options: Callable[[argparse.ArgumentParser], None]
    operands: str = ""


SUBCOMMANDS = {
    "speed": _Subcommand(
        "TFLOP/s of all contenders side by side",
        texts.SPEED,
        texts.SPEED_EXAMPLES,
        options.add_speed,
    ),
    "features": _Subcommand(
        "what each score feature costs, with a verdict",
        texts.FEATURES,
        texts.FEATURES_EXAMPLES,
        options.add_features,
    ),
    "cycles": _Subcommand(
        "cycles, instructions and memory traffic of a call, counted",
        texts.CYCLES,
        texts.CYCLES_EXAMPLES,
        options.add_cycles,
    ),
    "ladder": _Subcommand(
        "from the plain formula to the fastest kernel, step by step",
        texts.LADDER,
        texts.LADDER_EXAMPLES,
        options.add_ladder,
    ),
    "experiments": _Subcommand(
        "block size, dtype, length, head dim, heads, one at a time",
        texts.EXPERIMENTS,
        texts.EXPERIMENTS_EXAMPLES,
        options.add_experiments,
    ),
    "steps": _Subcommand(
        "one forward kernel from plain to full, what each step is worth",
        texts.STEPS,
        texts.STEPS_EXAMPLES,
        options.add_steps,
    ),
    "accuracy": _Subcommand(
        "errors against float64, with a verdict",
        texts.ACCURACY,
        texts.ACCURACY_EXAMPLES,
        options.add_accuracy,
    ),
    "robustness": _Subcommand(
        "errors and times on inputs made to break a softmax, with a verdict",
        texts.ROBUSTNESS,
        texts.ROBUSTNESS_EXAMPLES,
        options.add_robustness,
    ),
    "decode": _Subcommand(
        "TB/s of decoding from a KV cache, with a verdict",
        texts.DECODE,
        texts.DECODE_EXAMPLES,
        options.add_decode,
    ),
    "memory": _Subcommand(
        "peak memory against the sequence length, with a verdict",
        texts.MEMORY,
        texts.MEMORY_EXAMPLES,
        options.add_memory,
    ),
    "overhead": _Subcommand(
        "host microseconds per call",
        texts.OVERHEAD,
        texts.OVERHEAD_EXAMPLES,
        options.add_overhead,
    ),
    "compare": _Subcommand(
        "two result files: what moved, and is it worse",
        texts.COMPARE,
        texts.COMPARE_EXAMPLES,
        options.add_compare,
        operands=" A.json B.json",
    ),
    "plot": _Subcommand(
        "the chart of a result file of speed",
        texts.PLOT,
        texts.PLOT_EXAMPLES,
        options.add_plot,
        operands=" RESULTS.json",
    ),
    "contenders": _Subcommand(
        "who can be measured on this machine",
        "Every contender, what it needs, and whether it can run here.",
        "",
        options.add_contenders,
    ),
}

_RUNNER = Subcommands(
    extra="bench",
    requires=("matplotlib", "pynvml", "rich"),
    module="cute_attention.bench.commands",
    mistakes=(BuildError, LayoutError, ValueError, OSError),
)


def make_parser(prog: str = "python -m cute_attention bench") -> argparse.ArgumentParser:
    """The parser of the benchmark's command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=texts.INTRODUCTION,
        epilog=texts.EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, subcommand in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=subcommand.summary,
            usage=f"%(prog)s{subcommand.operands} [options]",
            description=subcommand.description,
            epilog=subcommand.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subcommand.add_options(subparser)
    return parser


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m cute_attention bench"
) -> int:
    """Runs a subcommand of the benchmark and returns the exit code."""
    return _RUNNER.run(make_parser(prog), arguments)
