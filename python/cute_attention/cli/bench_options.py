"""The options of each subcommand of `bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..bench import cycles, experiments, features, forms, memory, robustness, steps
from ..bench.inputs import DISTRIBUTIONS
from ..bench.limits import ERROR_LIMIT, TIME_LIMITS
from ..bench.optimisations import ARCHITECTURES
from ..bench.options import (
    add_all_of,
    add_common,
    add_files,
    add_shapes,
    choices,
    label_and_folder,
    words,
)
from ..bench.points import DTYPES, FEATURES
from .numbers import chips


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


def add_speed(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser)
    _add_timing(parser, "fwd,bwd,fwdbwd")
    add_common(parser)
    parser.add_argument(
        "--against", type=Path, metavar="FILE.json", help="recorded figures to set beside ours"
    )
    _add_builds(parser)


def _add_builds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--build",
        dest="builds",
        type=label_and_folder,
        action="append",
        default=[],
        metavar="LABEL=FOLDER",
        help="also measure ours in another build: a package that `pip install --target FOLDER` put "
        "there, or kernel libraries alone; may be repeated",
    )


def add_cycles(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser)
    add_all_of(parser, "--direction", steps.DIRECTIONS)
    parser.add_argument(
        "--clock",
        choices=cycles.CLOCKS,
        default="base",
        help="base (default): Nsight Compute holds the base clock; none: the clock is free",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    add_common(parser, plot=False)
    _add_builds(parser)


def add_features(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, features=())
    group = parser.add_argument_group("what is compared")
    values = features.Values()
    group.add_argument(
        "--features",
        type=words,
        default=list(features.DEFAULT),
        metavar="NAMES",
        help=f"each with others joined to it by +; default: {','.join(features.DEFAULT)}",
    )
    group.add_argument(
        "--softcap",
        dest="softcap_value",
        type=float,
        default=values.softcap,
        metavar="CAP",
        help=f"where a feature is softcap; default: {values.softcap:g}",
    )
    group.add_argument(
        "--dropout",
        dest="dropout_value",
        type=float,
        default=values.dropout,
        metavar="P",
        help=f"where a feature is dropout; default: {values.dropout:g}",
    )
    _add_timing(parser, "fwd,bwd")
    add_common(parser, plot=False)
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="the tables as Markdown")


def add_ladder(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False)
    _add_timing(parser, "fwd,fwdbwd")
    add_common(parser)


def add_experiments(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False, features=())
    add_all_of(
        parser, "--experiments", tuple(experiments.EXPERIMENTS), "what is varied; default: all"
    )
    group = parser.add_argument_group("the kernels of the blocks")
    group.add_argument("--arch", choices=ARCHITECTURES, help="of those that --build-only builds")
    _add_kernels(group)
    _add_timing(parser, "fwd,fwdbwd")
    add_common(parser)


def _add_kernels(group: argparse._ArgumentGroup) -> None:
    """Options of subcommands whose kernels may be built on another machine."""
    group.add_argument(
        "--kernels",
        type=Path,
        metavar="DIR",
        help="their libraries; without it they are built, and kept in the cache",
    )
    group.add_argument(
        "--build-only",
        action="store_true",
        help="build them into --kernels, and end",
    )
    group.add_argument(
        "--chips",
        type=chips,
        metavar="80,90",
        help="that the sm80 kernels are built for; default: this machine's, or 80",
    )


def add_steps(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False, features=())
    group = parser.add_argument_group("the kernels, and how they are timed")
    add_all_of(group, "--architectures", ARCHITECTURES)
    _add_kernels(group)
    group.add_argument(
        "--pictures", type=Path, metavar="DIR", help="draw K in shared memory (the layout lab)"
    )
    group.add_argument("--rounds", type=int, default=5, help="turns of each step; default: 5")
    group.add_argument("--time-ms", type=float, default=100.0, help="of each turn; default: 100")
    add_files(parser)


def add_accuracy(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False, features=("softcap",))
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


def add_robustness(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False, features=("softcap",))
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


def add_decode(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shapes (lists are comma-separated; every combination runs)")
    group.add_argument(
        "--layouts", type=words, metavar="HEADS/HEADS_KVxHEAD_DIM,...", help="such as 32/8x128"
    )
    group.add_argument("--batches", type=words, metavar="BATCHxKEYS,...", help="such as 8x8192")
    group.add_argument(
        "--page-size", type=int, default=0, metavar="N", help="0 (default): a contiguous cache"
    )
    group.add_argument("--dtype", choices=DTYPES, help="default: bf16, on a CPU fp32")
    _add_timing(parser, "fwd")
    add_common(parser)


def add_memory(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, sets=False)
    add_all_of(parser, "--direction", memory.DIRECTIONS)
    add_common(parser)


def add_overhead(parser: argparse.ArgumentParser) -> None:
    # A bias would have to follow the keys of decoding, and packed calls are measured without one.
    others = [name for name in FEATURES if name != "bias"]
    add_shapes(parser, sets=False, features=others)
    add_all_of(parser, "--forms", tuple(forms.FORMS))
    add_all_of(parser, "--modes", steps.MODES)
    parser.add_argument("--calls", type=int, default=100, help="per round; default: 100")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    add_common(parser, plot=False)


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="A.json")
    parser.add_argument("new", type=Path, metavar="B.json")
    parser.add_argument(
        "--threshold", type=float, default=0.05, help="relative change that counts; default: 0.05"
    )
    parser.add_argument("--all", action="store_true", help="show all rows, not what moved alone")
    parser.add_argument(
        "--everybody", action="store_true", help="fail for other contenders' rows too"
    )


def add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="PNG, SVG or PDF, by its ending"
    )
    parser.add_argument(
        "--direction", type=choices(steps.DIRECTIONS), metavar="fwd,bwd,fwdbwd", help="default: all"
    )
    parser.add_argument("--contenders", type=words, metavar="NAMES", help="default: all")


def add_contenders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cuda, cuda:N or cpu")
