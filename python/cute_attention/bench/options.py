"""Command-line options that several subcommands share, and the points they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .contenders import CONTENDERS
from .points import DTYPES, FEATURES, Bounds, Grid, Point, lengths_point, packed_point
from .sets import MASKS, SETS, named_set

# A named set decides these itself, so they cannot be given beside --set.
FIXED: tuple[str, ...] = (
    "batch",
    "heads",
    "heads_kv",
    "seqlen_k",
    "head_dim_v",
    "window",
    "tokens",
    "hidden",
)
FIXED += ("packed", "lengths")


@dataclass(frozen=True)
class Defaults:
    """The shapes that a subcommand measures where the command line does not say."""

    head_dims: tuple[int, ...]
    masks: tuple[str, ...]
    seqlens: tuple[int, ...]
    dtypes: tuple[str, ...]
    tokens: int = 16384
    hidden: int = 2048
    batch: int | None = None
    heads: int | None = None
    named: str | None = None  # the set measured when no shape is given at all


def words(text: str) -> list[str]:
    """The words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _integers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def label_and_folder(text: str) -> tuple[str, Path]:
    """LABEL=FOLDER; the label becomes part of a name in tables, and so has no space."""
    label, equals, folder = text.partition("=")
    if not equals or not folder or not label or " " in label:
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=FOLDER")
    return label, Path(folder)


def choices(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated words out of `allowed`."""

    def parse(text: str) -> list[str]:
        given = words(text)
        for word in given:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(allowed)}")
        return given

    return parse


def add_all_of(
    parser: argparse._ActionsContainer, flag: str, allowed: Sequence[str], help: str | None = None
) -> None:
    """An option that takes a comma-separated list out of `allowed`, and all of it by default."""
    metavar = ",".join(allowed)
    parser.add_argument(
        flag, type=choices(allowed), default=list(allowed), metavar=metavar, help=help
    )


def _bounds(text: str) -> Bounds:
    sides = words(text)
    if len(sides) != 2 or not all(side == "inf" or side.isdigit() for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not LEFT,RIGHT, each a number or inf")
    left, right = (None if side == "inf" else int(side) for side in sides)
    return Bounds(left, right)


def add_shapes(
    parser: argparse.ArgumentParser, sets: bool = True, features: Sequence[str] = FEATURES
) -> None:
    """Options that choose points. Lists are separated by commas and combined in every way.
    `features` are those of FEATURES that all points may be given."""
    group = parser.add_argument_group("shapes (lists are comma-separated; every combination runs)")
    if sets:
        described = "; ".join(f"{name}: {text}" for name, text in SETS.items())
        group.add_argument(
            "--set",
            type=choices(list(SETS)),
            metavar="NAMES",
            help=f"named sets, which the lists below then filter. {described}",
        )
    group.add_argument("--batch", type=int, help="default: --tokens / seqlen")
    group.add_argument("--heads", type=int, help="default: --hidden / head dim")
    group.add_argument("--heads-kv", type=int, help="fewer: grouped queries; 1: multi-query")
    group.add_argument(
        "--seqlens",
        "--seqlen",
        "--seqlen-q",
        type=_integers,
        metavar="N,...",
        help="tokens per sequence",
    )
    group.add_argument("--seqlen-k", type=int, metavar="N", help="default: as --seqlens")
    group.add_argument("--head-dims", "--head-dim", type=_integers, metavar="N,...")
    group.add_argument("--head-dim-v", type=int, metavar="N", help="default: as --head-dims")
    group.add_argument("--masks", "--mask", type=choices(MASKS), metavar="full,causal")
    group.add_argument(
        "--window", type=_bounds, metavar="LEFT,RIGHT", help="keys seen on each side; inf: all"
    )
    _add_features(group, features)
    group.add_argument(
        "--dtypes", "--dtype", type=choices(DTYPES), metavar="fp16,bf16,...", help="of the inputs"
    )
    group.add_argument("--deterministic", action="store_true", help="ask for bitwise gradients")
    group.add_argument("--tokens", type=int, help="batch x seqlen where --batch is not given")
    group.add_argument("--hidden", type=int, help="heads x head dim where --heads is not given")
    group.add_argument(
        "--packed",
        metavar="TOTAL:MEAN[:SEED]",
        help="packed documents of exponential lengths, TOTAL tokens in all",
    )
    group.add_argument(
        "--lengths", type=_integers, metavar="N,...", help="packed documents of these lengths"
    )


def _add_features(group: argparse._ArgumentGroup, features: Sequence[str]) -> None:
    numbers = {
        "softcap": ("CAP", "scores become CAP * tanh(scores / CAP)"),
        "dropout": ("P", "share of the probabilities to drop"),
    }
    switches = {
        "alibi": "add ALiBi",
        "bias": "add a learned bias, [1, heads, seqlen_q, seqlen_k]",
        "sink": "a learned sink per head",
    }
    for name in features:
        if name in numbers:
            metavar, text = numbers[name]
            group.add_argument(f"--{name}", type=float, default=0.0, metavar=metavar, help=text)
        else:
            group.add_argument(f"--{name}", action="store_true", help=switches[name])


def add_common(parser: argparse.ArgumentParser, plot: bool = True) -> None:
    """Options about contenders, device and files."""
    group = parser.add_argument_group("who, where, and what is kept")
    group.add_argument(
        "--contenders",
        metavar="NAMES",
        help=f"comma-separated, or all: {', '.join(CONTENDERS)}. `contenders` explains them",
    )
    _add_device_and_files(group, plot)


def add_files(parser: argparse.ArgumentParser) -> None:
    """Options about device and files, of a subcommand that chooses its contenders itself."""
    _add_device_and_files(parser.add_argument_group("where, and what is kept"), plot=True)


def _add_device_and_files(group: argparse._ArgumentGroup, plot: bool) -> None:
    group.add_argument("--device", help="cuda, cuda:N or cpu; default: the GPU if there is one")
    group.add_argument("--json", type=Path, metavar="FILE", help="rewritten as rows come in")
    group.add_argument("--csv", type=Path, metavar="FILE")
    if plot:
        group.add_argument("--plot", type=Path, metavar="FILE.png")
    group.add_argument(
        "--limit-s", type=float, metavar="S", help="start nothing new after so many seconds"
    )
    group.add_argument("--quiet", action="store_true", help="the tables alone, no progress")


def build_points(args: argparse.Namespace, defaults: Defaults) -> list[Point]:
    """The points that the options describe."""
    names = getattr(args, "set", None)
    if names is None and not _shaped(args) and defaults.named:
        names = [defaults.named]
    if names is not None:
        points = [point for name in names for point in named_set(name)]
        return _filtered(points, args, defaults)
    packed = args.packed or args.lengths
    if args.packed and args.lengths:
        raise ValueError("--packed and --lengths exclude each other")
    if packed and (args.batch or args.seqlens or args.seqlen_k):
        raise ValueError("packed documents have no --batch and no --seqlens")
    grid = Grid(
        head_dims=args.head_dims or defaults.head_dims,
        masks=args.masks or defaults.masks,
        seqlens=(1,) if packed else args.seqlens or defaults.seqlens,
        dtypes=args.dtypes or defaults.dtypes,
        tokens=args.tokens or defaults.tokens,
        hidden=args.hidden or defaults.hidden,
        batch=args.batch or defaults.batch,
        heads=args.heads or defaults.heads,
    )
    return [_with_options(point, args) for point in grid.points()]


def _shaped(args: argparse.Namespace) -> bool:
    return any(
        getattr(args, name) is not None for name in (*FIXED, "seqlens", "head_dims", "masks")
    )


def _with_options(point: Point, args: argparse.Namespace) -> Point:
    """A point of the grid with the options that apply to all points."""
    extra = {
        "heads_kv": args.heads_kv or point.heads,
        "head_dim_v": args.head_dim_v or point.head_dim,
        "window": args.window,
        "deterministic": args.deterministic,
        **_features(args),
    }
    if args.packed or args.lengths:
        extra |= {name: getattr(point, name) for name in ("heads", "head_dim", "dtype", "causal")}
        if args.packed:
            return packed_point(args.packed, **extra)
        return lengths_point(args.lengths, **extra)
    return replace(point, seqlen_k=args.seqlen_k or point.seqlen_q, **extra)


def _features(args: argparse.Namespace) -> dict[str, Any]:
    """The features that all points are given."""
    return {name: value for name in FEATURES if (value := getattr(args, name, None))}


def _filtered(points: list[Point], args: argparse.Namespace, defaults: Defaults) -> list[Point]:
    """The points of named sets that the lists on the command line select, in each dtype asked for.
    Named sets keep their shapes."""
    given = [name for name in FIXED if getattr(args, name) is not None]
    given += _features(args)
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags} cannot change the shapes of a named set: leave out --set")
    kept = [
        point
        for point in points
        if (args.head_dims is None or point.head_dim in args.head_dims)
        and (args.seqlens is None or point.seqlen_q in args.seqlens)
        and (args.masks is None or ("causal" if point.causal else "full") in args.masks)
    ]
    if not kept:
        raise ValueError("no point of the named set passes the filters")
    return [
        replace(point, dtype=dtype, deterministic=args.deterministic)
        for dtype in args.dtypes or defaults.dtypes
        for point in kept
    ]
