"""`decode`, from its options to its verdict."""

from __future__ import annotations

import argparse
from dataclasses import replace

from . import decode, decode_report
from .beginning import begin, report_absent, speed_settings
from .report import Report
from .results import Row
from .tables import make_console


def run_decode(args: argparse.Namespace) -> int:
    """Measures the grid, or what was asked for of it."""
    console = make_console()
    if args.direction != ["fwd"]:
        raise ValueError("--direction of decode is fwd: a cache has no gradient")
    device, environment = begin(args, console)
    on_gpu = device.type == "cuda"
    points = decode.grid(
        args.layouts or (decode.LAYOUTS if on_gpu else decode.CPU_LAYOUTS),
        args.batches or (decode.BATCHES if on_gpu else decode.CPU_BATCHES),
        args.dtype or ("bf16" if on_gpu else "fp32"),
    )
    contenders = decode.select(args.contenders, args.page_size, device)
    args.contenders = None
    settings = replace(
        speed_settings(args, device, environment, memory=False), contenders=contenders
    )
    absent = report_absent(contenders, device, args, console)
    with Report("decode", args, environment, console, len(points)) as report:

        def done(rows: list[Row]) -> None:
            present = [row for row in rows if row.contender not in absent]
            report.add(rows, decode_report.progress(report.heading(), present or rows))

        decode.Decode(settings, args.page_size).measure(points, done)
    passed = decode_report.print_decode(console, report.rows)
    if args.plot and any(row.metrics for row in report.rows):
        decode_report.plot_decode(args.plot, report.rows, environment.device)
        console.print(f"plot: {args.plot}")
    return 0 if passed else 1
