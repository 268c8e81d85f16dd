"""`bench`: its subcommands, their options, and the texts that teach them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..bench import forms, memory, robustness, steps
from ..bench.inputs import DISTRIBUTIONS
from ..bench.limits import ERROR_LIMIT, TIME_LIMITS
from ..bench.options import add_all_of, add_common, add_shapes, choices, words
from .subcommands import Subcommands

INTRODUCTION = """\
Measures attention: ours by backend, PyTorch's own, and every other package that is installed.

Without a GPU everything runs on the CPU at small shapes: the reference backend against PyTorch.
What cannot run is listed with the reason, at the end of each table.
"""

EPILOGUE = """\
start here:
  python -m cute_attention bench contenders         who can be measured on this machine
  python -m cute_attention bench speed --set short  short sequences, a few minutes
  python -m cute_attention bench speed --help       each subcommand teaches by examples

How times are taken, which FLOPs are counted and what the peak of a GPU means: docs/benchmarking.md
"""

SPEED = """\
Contenders take turns at every point, over several rounds, after a warm-up and with the L2 cache
flushed before each call. The time is the median of the rounds' medians; the spread is how far apart
the rounds lie. Results that differ between contenders are refused: nobody is fast by computing
something else.
"""

SPEED_EXAMPLES = """\
examples:
  # the paper's grid, forward and backward, all tables and a plot
  python -m cute_attention bench speed --direction fwd,bwd --json h200.json --plot h200.png
  # a quick look while tuning: two contenders, a part of the grid, under two minutes
  python -m cute_attention bench speed --set paper --head-dims 128 --seqlens 1024,8192 \\
      --contenders sm90,cudnn --rounds 3 --time-ms 30 --limit-s 120
  # one shape of your own
  python -m cute_attention bench speed --batch 2 --heads 32 --heads-kv 8 --seqlens 4096 \\
      --head-dims 128 --masks causal --window 1024,0
  # packed documents: 32k tokens, 2048 on average
  python -m cute_attention bench speed --packed 32768:2048 --heads 16 --head-dims 128 --masks causal
  # the shapes of 30 models, with the points at which a peer is faster
  python -m cute_attention bench speed --set models --direction fwd,bwd --plot models.png
  # recorded figures of contenders that are not installed here
  python -m cute_attention bench speed --set paper --against recorded.json
"""

LADDER = """\
The steps from the plain formula to the fastest kernel, each timed and with its peak memory, and how
both grow with the sequence length. A step that this machine lacks is listed with the reason.
"""

LADDER_EXAMPLES = """\
examples:
  python -m cute_attention bench ladder --plot ladder.png
  python -m cute_attention bench ladder --seqlens 1024,2048,4096 --direction fwd
"""

ACCURACY = """\
Errors of output, LSE and gradients against float64 over several draws, and a verdict: ours must be
at most 1.10 times those of the better of FLASH and cuDNN on the same inputs, beyond what the draws
leave open, and at most twice those of plain PyTorch in the same dtype. Exit code 1 if they are not.
"""

ACCURACY_EXAMPLES = """\
examples:
  python -m cute_attention bench accuracy
  python -m cute_attention bench accuracy --dtypes bf16 --head-dims 128 --inputs outlier
  python -m cute_attention bench accuracy --inputs normal,q-x3,q-x5,q-x10 --draws 16 \\
      --contenders sm90,sm80,auto,flash,cudnn,plain
"""

ROBUSTNESS = """\
Inputs made to break an online softmax, such as attention sinks, scores that grow from tile to tile
and keys hidden by -infinity: the error of each result against float64, beside the better of FLASH
and cuDNN, and the time over that of standard normal inputs of the same shape, measured in turn.
Exit code 1 where a time or an error of ours is above its limit.
"""

ROBUSTNESS_EXAMPLES = """\
examples:
  python -m cute_attention bench robustness --list
  python -m cute_attention bench robustness --json robustness.json
  python -m cute_attention bench robustness --inputs sink,slope --head-dims 128 --dtypes bf16 \\
      --direction fwd --contenders sm90,flash
"""

MEMORY = """\
Peak memory beyond the inputs, forward (no gradient) and forward with backward, against the sequence
length. Ours must be linear. Exit code 1 if it is not.
"""

MEMORY_EXAMPLES = """\
examples:
  python -m cute_attention bench memory --plot memory.png
  python -m cute_attention bench memory --contenders reference,plain --seqlens 1024,2048,4096
"""

OVERHEAD = """\
Host microseconds per call: without and with gradient recorded, and with the backward; dense, with
the LSE returned, packed, and decoding, where each call has another number of keys; called plainly
(eager), through torch.compile (compiled), and replayed as a CUDA graph (graph).
"""

OVERHEAD_EXAMPLES = """\
examples:
  python -m cute_attention bench overhead
  python -m cute_attention bench overhead --contenders auto,flash --modes eager
  python -m cute_attention bench overhead --forms decode,packed
"""

COMPARE = """\
Two JSON files of the same subcommand side by side. A row moved if it changed by more than the
threshold and by more than the larger spread of the two. Exit code 1 if a row of ours is worse or no
longer measured.
"""

COMPARE_EXAMPLES = """\
examples:
  python -m cute_attention bench compare before.json after.json
  python -m cute_attention bench compare before.json after.json --threshold 0.1 --all
"""

PLOT = """\
The chart of a JSON file that `speed` has written: lines over the sequence length, or, of points
that have names, every contender's speed over that of the best peer.
"""

PLOT_EXAMPLES = """\
examples:
  python -m cute_attention bench plot h200.json --output h200.png
  python -m cute_attention bench plot h200.json --output forward.svg --direction fwd
"""


def _add_timing(parser: argparse.ArgumentParser, directions: str) -> None:
    group = parser.add_argument_group("how it is timed")
    group.add_argument(
        "--direction",
        "--directions",
        type=choices(steps.DIRECTIONS),
        default=directions.split(","),
        metavar="fwd,bwd,fwdbwd",
        help=f"backward is timed alone in bwd; default: {directions}",
    )
    group.add_argument("--rounds", type=int, default=5, help="turns of each contender; default: 5")
    group.add_argument(
        "--time-ms", type=float, default=100.0, help="per contender and round; default: 100"
    )
    group.add_argument("--seed", type=int, default=0, help="of the inputs")


def _speed(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser)
    _add_timing(parser, "fwd,bwd,fwdbwd")
    add_common(parser)
    parser.add_argument(
        "--against", type=Path, metavar="FILE.json", help="recorded figures to set beside ours"
    )


def _ladder(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False)
    _add_timing(parser, "fwd,fwdbwd")
    add_common(parser)


def _accuracy(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False)
    described = "; ".join(f"{name}: {text}" for name, text in DISTRIBUTIONS.items())
    parser.add_argument(
        "--inputs",
        type=choices(list(DISTRIBUTIONS)),
        default=list(DISTRIBUTIONS),
        metavar="NAMES",
        help=f"default: all. {described}",
    )
    parser.add_argument(
        "--draws", type=int, default=4, metavar="N", help="of each kind of inputs; default: 4"
    )
    add_common(parser, plot=False)


def _robustness(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False)
    group = parser.add_argument_group("what is measured, and what passes")
    group.add_argument(
        "--inputs",
        type=words,
        default=["all"],
        metavar="NAMES",
        help="of inputs or groups of them, the first word of a name; default: all",
    )
    group.add_argument("--list", action="store_true", help="show the inputs and end")
    for name, limit in TIME_LIMITS.items():
        group.add_argument(
            f"--time-limit-{name}",
            type=float,
            default=limit,
            metavar="RATIO",
            help=f"time over that of normal inputs, for {name}; default: {limit}",
        )
    group.add_argument(
        "--error-limit",
        type=float,
        default=ERROR_LIMIT,
        metavar="RATIO",
        help=f"rms error over the better peer's; default: {ERROR_LIMIT}",
    )
    add_all_of(group, "--direction", robustness.DIRECTIONS)
    group.add_argument("--rounds", type=int, default=5, help="turns of each input; default: 5")
    group.add_argument("--time-ms", type=float, default=5.0, help="of each turn; default: 5")
    group.add_argument("--seed", type=int, default=0, help="of the inputs")
    add_common(parser, plot=False)


def _memory(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False)
    add_all_of(parser, "--direction", memory.DIRECTIONS)
    add_common(parser)


def _overhead(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False)
    add_all_of(parser, "--forms", tuple(forms.FORMS))
    add_all_of(parser, "--modes", steps.MODES)
    parser.add_argument("--calls", type=int, default=100, help="per round; default: 100")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    add_common(parser, plot=False)


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="A.json")
    parser.add_argument("new", type=Path, metavar="B.json")
    parser.add_argument(
        "--threshold", type=float, default=0.05, help="relative change that counts; default: 0.05"
    )
    parser.add_argument("--all", action="store_true", help="show all rows, not what moved alone")
    parser.add_argument(
        "--everybody", action="store_true", help="fail for other contenders' rows too"
    )


def _plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="PNG, SVG or PDF, by its ending"
    )
    parser.add_argument(
        "--direction", type=choices(steps.DIRECTIONS), metavar="fwd,bwd,fwdbwd", help="default: all"
    )
    parser.add_argument("--contenders", type=words, metavar="NAMES", help="default: all")


def _contenders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cuda, cuda:N or cpu")


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
        SPEED,
        SPEED_EXAMPLES,
        _speed,
    ),
    "ladder": _Subcommand(
        "from the plain formula to the fastest kernel, step by step",
        LADDER,
        LADDER_EXAMPLES,
        _ladder,
    ),
    "accuracy": _Subcommand(
        "errors against float64, with a verdict",
        ACCURACY,
        ACCURACY_EXAMPLES,
        _accuracy,
    ),
    "robustness": _Subcommand(
        "errors and times on inputs made to break a softmax, with a verdict",
        ROBUSTNESS,
        ROBUSTNESS_EXAMPLES,
        _robustness,
    ),
    "memory": _Subcommand(
        "peak memory against the sequence length, with a verdict",
        MEMORY,
        MEMORY_EXAMPLES,
        _memory,
    ),
    "overhead": _Subcommand(
        "host microseconds per call",
        OVERHEAD,
        OVERHEAD_EXAMPLES,
        _overhead,
    ),
    "compare": _Subcommand(
        "two result files: what moved, and is it worse",
        COMPARE,
        COMPARE_EXAMPLES,
        _compare,
        operands=" A.json B.json",
    ),
    "plot": _Subcommand(
        "the chart of a result file of speed",
        PLOT,
        PLOT_EXAMPLES,
        _plot,
        operands=" RESULTS.json",
    ),
    "contenders": _Subcommand(
        "who can be measured on this machine",
        "Every contender, what it needs, and whether it can run here.",
        "",
        _contenders,
    ),
}

_RUNNER = Subcommands(
    extra="bench",
    requires=("matplotlib", "pynvml", "rich"),
    module="cute_attention.bench.commands",
    mistakes=(ValueError, OSError),
)


def make_parser(prog: str = "python -m cute_attention bench") -> argparse.ArgumentParser:
    """The parser of the benchmark's command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=INTRODUCTION,
        epilog=EPILOGUE,
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
