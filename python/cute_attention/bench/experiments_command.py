"""`experiments`, from its options to its tables and plot."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from rich.console import Console

from ..rows.cost import typical_device
from . import experiments, kernel_folder
from .beginning import begin, report_absent, speed_settings
from .experiments_report import plot_experiments, print_experiments, value_of
from .options import Defaults, build_points
from .points import Point
from .report import Report
from .results import Row
from .tables import make_console, number, titled

_GPU = Defaults((128,), ("full",), (4096,), ("bf16",), batch=4, heads=16)
_CPU = Defaults((64,), ("full",), (256,), ("fp32",), batch=1, heads=4)


def values_of(args: argparse.Namespace, device: torch.device) -> experiments.Values:
    """What is varied: the lists of the command line, and the defaults where it has none."""
    values = experiments.GPU if device.type == "cuda" else experiments.CPU
    lengths = tuple(args.seqlens or ())
    head_dims = tuple(args.head_dims or ())
    return replace(
        values,
        lengths=lengths if len(lengths) > 1 else values.lengths,
        head_dims=head_dims if len(head_dims) > 1 else values.head_dims,
    )


def base_of(args: argparse.Namespace, device: torch.device) -> Point:
    """The point around which all varies: of lists the first value."""
    return build_points(args, _GPU if device.type == "cuda" else _CPU)[0]


def run_experiments(args: argparse.Namespace) -> int:
    """Measures the experiments that were asked for."""
    console = make_console()
    if args.build_only:
        return _build(args, console)
    device, environment = begin(args, console)
    base, values = base_of(args, device), values_of(args, device)
    if base.varlen:
        raise ValueError("experiments vary the sizes of dense calls: leave out --packed, --lengths")
    args.contenders = args.contenders or experiments.default_contenders(device)
    settings = speed_settings(args, device, environment, memory=True)
    absent = report_absent(settings.contenders, device, args, console)
    if device.type != "cuda" and not args.quiet:
        console.print(
            "without a GPU: blocks are blocks of keys on the reference backend, and no kernel runs"
        )
    bench = experiments.Experiments(settings, base, values, args.kernels)
    total = bench.count(args.experiments)
    with Report("experiments", args, environment, console, total) as report:

        def done(rows: list[Row]) -> None:
            shown = [row for row in rows if row.contender not in absent]
            report.add(rows, [f"{report.heading()} {_line(row)}" for row in shown])

        bench.measure_all(args.experiments, done)
    print_experiments(console, report.rows)
    if args.plot and any(row.metrics for row in report.rows):
        plot_experiments(args.plot, report.rows, environment.device)
        console.print(f"plot: {args.plot}")
    return 0


def _build(args: argparse.Namespace, console: Console) -> int:
    """Builds the kernels of the blocks into the folder."""
    if args.kernels is None or args.arch is None:
        raise ValueError("--build-only needs --arch, and --kernels DIR for the libraries")
    base = experiments.block_point(build_points(args, _GPU)[0])
    room = typical_device(args.arch).shared_memory_per_block
    rows = experiments.rows_like(base, args.arch, room)
    if not rows:
        raise ValueError(f"no row of the tables of {args.arch} computes {base.text()}")
    for row in rows:
        console.print(f"{row.name}: {kernel_folder.build(row, args.kernels, args.chips)}")
    return 0


def _line(row: Row) -> str:
    name = row.case.partition(" ")[0]
    what = f"{name} {value_of(row)}, {row.what}, {titled(row.contender)}"
    if not row.metrics:
        return f"{what}: - {row.reason}"
    metrics = row.metrics
    return (
        f"{what}: {number(metrics['time_ms'])} ms, {number(metrics['memory_mib'])} MiB, "
        f"{number(metrics['tflops'])} TFLOP/s"
    )
