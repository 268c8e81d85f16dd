"""The subcommands of the benchmark: what each does with its options."""

from __future__ import annotations

import argparse
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from . import (
    accuracy,
    adversarial,
    cycles_command,
    decode_command,
    experiments_command,
    features,
    features_verdict,
    ladder,
    memory_curve,
    optimisation_command,
    overhead,
    robustness,
)
from .accuracy_verdict import print_accuracy
from .against import joining, read_recorded
from .beginning import begin, report_absent, speed_settings
from .builds import BuildsBench, builds_of, running, with_builds
from .compare import compare, print_comparison
from .contenders import BUILD, CONTENDERS, default_names, select
from .limits import Limits
from .machine import Environment, pick_device
from .options import Defaults, build_points
from .points import Point
from .report import Report, speed_lines
from .results import Row, read_json
from .robustness_verdict import print_robustness
from .sets import MASKS, POWERS
from .speed import Bench, Settings, command
from .steps import Deadline
from .tables import make_console, make_table, print_speed, titled

GPU = Defaults((64, 128, 256), MASKS, POWERS, ("bf16",), named="paper")
CPU = Defaults((64,), MASKS, (128, 256, 512), ("fp32",), tokens=512, hidden=256, named="cpu")


def _run_speed(
    kind: str,
    args: argparse.Namespace,
    points: Sequence[Point],
    settings: Settings,
    environment: Environment,
    console: Console,
) -> list[Row]:
    """The measurement that `speed` and `ladder` share."""
    absent = report_absent(settings.contenders, settings.device, args, console)
    present = [c for c in settings.contenders if c.name not in absent]
    with Report(kind, args, environment, console, len(points) * len(settings.directions)) as report:

        def done(rows: list[Row]) -> None:
            lines = speed_lines(report, rows, skip=absent)
            again = command(rows[0].point, rows[0].what, settings, present)
            report.add(rows, [*lines, Text(f"    {again}", style="dim")])

        bench = BuildsBench if any(c.role == BUILD for c in settings.contenders) else Bench
        bench(settings).measure(points, done)
    return report.rows


def run_speed(args: argparse.Namespace) -> int:
    console = make_console()
    recorded = read_recorded(args.against) if args.against else []
    device, environment = begin(args, console)
    points = build_points(args, GPU if device.type == "cuda" else CPU)
    settings = speed_settings(args, device, environment, memory=False)
    with running(builds_of(args.builds), device, settings.seed) as builds:
        made = with_builds(settings.contenders, builds)
        settings = replace(settings, contenders=made)
        rows = _run_speed("speed", args, points, settings, environment, console)
    rows = [*rows, *joining(recorded, rows)]
    print_speed(console, rows)
    if device.type == "cuda":
        console.print(environment.peak_text())
    if args.plot and any(row.metrics for row in rows):
        from .plots import plot_speed

        plot_speed(args.plot, rows, environment.device)
        console.print(f"plot: {args.plot}")
    return 0


def run_features(args: argparse.Namespace) -> int:
    console = make_console()
    values = features.Values(args.softcap_value, args.dropout_value)
    device, environment = begin(args, console)
    if device.type == "cuda":
        defaults = Defaults((64, 128, 256), MASKS, (1024, 4096, 16384), ("bf16",))
    else:
        defaults = Defaults((64,), MASKS, (256,), ("fp32",), batch=1, heads=4)
    args.contenders = args.contenders or features.default_contenders(device)
    points = build_points(args, defaults)
    settings = speed_settings(args, device, environment, memory=False)
    bench = features.Features(settings, args.features, values)
    report_absent(settings.contenders, device, args, console)
    total = len(points) * len(settings.directions)
    with Report("features", args, environment, console, total) as report:

        def done(rows: list[Row]) -> None:
            report.add(rows, features_verdict.progress(report.heading(), rows))

        bench.measure(points, done)
    passed = features_verdict.print_features(console, report.rows)
    if args.markdown:
        args.markdown.write_text(features_verdict.markdown(report.rows))
    return 0 if passed else 1


def run_ladder(args: argparse.Namespace) -> int:
    console = make_console()
    device, environment = begin(args, console)
    if device.type == "cuda":
        defaults = Defaults((128,), ("causal",), POWERS, ("bf16",), batch=1, heads=16)
    else:
        defaults = Defaults((64,), ("causal",), (256, 512, 1024), ("fp32",), batch=1, heads=4)
    points = build_points(args, defaults)
    args.contenders = args.contenders or ladder.STEPS
    settings = speed_settings(args, device, environment, memory=True)
    rows = _run_speed("ladder", args, points, settings, environment, console)
    ladder.print_ladder(console, rows)
    _plot_growth(
        args.plot,
        rows,
        {"time_ms": "time, ms", "memory_mib": "peak memory, MiB"},
        environment,
        "From the plain formula to the fastest kernel",
        console,
    )
    return 0


def _plot_growth(
    path: Path | None,
    rows: Sequence[Row],
    metrics: dict[str, str],
    environment: Environment,
    title: str,
    console: Console,
) -> None:
    if path and any(row.metrics for row in rows):
        from .plots import plot_growth

        plot_growth(path, rows, metrics, environment.device, title)
        console.print(f"plot: {path}")


def _progress(
    report: Report, row: Row, what: str, metric: str, unit: str, absent: Container[str]
) -> list[str]:
    """The line to print about a finished row. Contenders that this machine lacks have none:
    `report_absent` has printed them at the start."""
    if row.contender in absent:
        return []
    figure = f"{row.metrics[metric]:.1f} {unit}" if row.metrics else f"- {row.reason}"
    return [f"{report.heading()} {what} {titled(row.contender)}: {figure}"]


def run_memory(args: argparse.Namespace) -> int:
    console = make_console()
    device, environment = begin(args, console)
    lengths = (1024, 2048, 4096, 8192, 16384, 32768)
    if device.type == "cuda":
        defaults = Defaults((128,), ("causal",), lengths, ("bf16",), batch=1, heads=16)
    else:
        defaults = Defaults((64,), ("causal",), (512, 1024, 2048), ("fp32",), batch=1, heads=2)
    points = build_points(args, defaults)
    names = args.contenders or ",".join(dict.fromkeys([*default_names(device), "plain"]))
    contenders = select(names, device)
    total = len(points) * len(args.direction) * len(contenders)
    absent = report_absent(contenders, device, args, console)
    deadline = Deadline(args.limit_s)
    with Report("memory", args, environment, console, total) as report:

        def done(row: Row) -> None:
            what = f"{row.what:7} {row.point.text()} "
            report.add([row], _progress(report, row, what, "memory_mib", "MiB", absent))

        memory_curve.measure(points, contenders, args.direction, device, deadline, done)
    memory_curve.print_memory(console, report.rows)
    label = {"memory_mib": "peak memory, MiB"}
    _plot_growth(args.plot, report.rows, label, environment, "Peak memory", console)
    return 1 if memory_curve.nonlinear(report.rows) else 0


def run_accuracy(args: argparse.Namespace) -> int:
    console = make_console()
    device, environment = begin(args, console)
    if device.type == "cuda":
        defaults = Defaults((64, 128, 256), MASKS, (1024,), ("fp16", "bf16"), batch=2, heads=4)
    else:
        defaults = Defaults((64,), MASKS, (256,), ("fp16", "bf16"), batch=1, heads=2)
    points = build_points(args, defaults)
    if args.draws < 1:
        raise ValueError(f"--draws is {args.draws}, expected at least 1")
    # FlexAttention compiles for every point, which takes long, and no rule compares with it.
    names = args.contenders or ",".join(name for name in CONTENDERS if name != "flex")
    contenders = select(names, device)
    total = len(points) * len(args.inputs)
    deadline = Deadline(args.limit_s)
    with Report("accuracy", args, environment, console, total) as report:

        def done(rows: list[Row]) -> None:
            text = f"{report.heading()} {rows[0].point.text()}, {rows[0].case} inputs"
            report.add(rows, [text])

        accuracy.measure(points, contenders, args.inputs, device, deadline, done, args.draws)
    return 0 if print_accuracy(console, report.rows) else 1


def run_robustness(args: argparse.Namespace) -> int:
    console = make_console()
    if args.list:
        table = make_table("inputs")
        for column in ("name", "what it is"):
            table.add_column(column)
        for entry in adversarial.ADVERSARIAL.values():
            table.add_row(entry.name, entry.description)
        console.print(table)
        return 0
    words = robustness.check_words(args.inputs)
    device, environment = begin(args, console)
    if device.type == "cuda":
        defaults = Defaults((64, 128, 256), MASKS, (2048,), ("bf16", "fp16"))
        names = "sm90,sm80,auto,flash,cudnn"
    else:
        defaults = Defaults((64,), MASKS, (256,), ("bf16", "fp16"), batch=1, heads=2)
        names = "reference,flash"
    points = build_points(args, defaults)
    robustness.check_points(points)
    settings = robustness.Settings(
        device=device,
        contenders=select(args.contenders or names, device),
        inputs=words,
        directions=args.direction,
        rounds=args.rounds,
        time_ms=args.time_ms,
        seed=args.seed,
    )
    limits = Limits({"sm90": args.time_limit_sm90, "sm80": args.time_limit_sm80}, args.error_limit)
    total = sum(len(robustness.entries_of(point, words)) for point in points)
    report_absent(settings.contenders, device, args, console)
    with Report("robustness", args, environment, console, total) as report:

        def done(rows: list[Row]) -> None:
            text = f"{report.heading()} {rows[0].point.text()}, {rows[0].case}"
            report.add(rows, [text])

        robustness.Robustness(settings, Deadline(args.limit_s)).measure(points, done)
    return 0 if print_robustness(console, report.rows, limits) else 1


def run_overhead(args: argparse.Namespace) -> int:
    console = make_console()
    device, environment = begin(args, console)
    point = overhead.default_point(device)
    defaults = Defaults(
        (point.head_dim,),
        ("full",),
        (point.seqlen_q,),
        (point.dtype,),
        batch=point.batch,
        heads=point.heads,
    )
    points = build_points(args, defaults)
    contenders = select(args.contenders, device)
    chosen = contenders, args.forms, args.modes
    total = sum(len(list(overhead.measurements(each, *chosen))) for each in points)
    absent = report_absent(contenders, device, args, console)
    deadline = Deadline(args.limit_s)
    with Report("overhead", args, environment, console, total) as report:

        def done(row: Row) -> None:
            what = f"{row.case:15} {overhead.KINDS[row.what]:27}"
            report.add([row], _progress(report, row, what, "host_us", "us", absent))

        for each in points:
            overhead.measure(each, *chosen, device, args.calls, args.rounds, deadline, done)
    overhead.print_overhead(console, report.rows)
    return 0


def run_compare(args: argparse.Namespace) -> int:
    console = make_console()
    comparison = compare(read_json(args.old), read_json(args.new), args.threshold)
    print_comparison(console, comparison, args.all)
    worse = comparison.regressions(args.everybody)
    if not comparison.changes:
        console.print(Text("FAIL: the files have no row in common", style="bold red"))
        return 1
    whose = "rows" if args.everybody else "rows of ours"
    if worse:
        text = (
            f"FAIL: {len(worse)} {whose} are worse by more than {args.threshold:.0%} and the spread"
        )
        console.print(Text(text, style="bold red"))
        return 1
    console.print(Text(f"PASS: no {whose} are worse", style="bold green"))
    return 0


def run_plot(args: argparse.Namespace) -> int:
    """Draws the chart of a result file, as the subcommand that wrote it does while it measures."""
    from .experiments_report import plot_experiments
    from .optimisation_chart import plot_steps
    from .plots import plot_speed

    draw = {"speed": plot_speed, "steps": plot_steps, "experiments": plot_experiments}
    results = read_json(args.results)
    if results.kind not in draw:
        kinds = ", ".join(draw)
        raise ValueError(
            f"{args.results} is a file of {results.kind}, expected one of these: {kinds}"
        )
    rows = [
        row
        for row in results.rows
        if row.metrics
        and (args.direction is None or row.what in args.direction)
        and (args.contenders is None or row.contender in args.contenders)
    ]
    if not rows:
        raise ValueError(f"{args.results} has no figure of what was asked for")
    draw[results.kind](args.output, rows, results.environment["device"])
    make_console().print(f"plot: {args.output}")
    return 0


def run_contenders(args: argparse.Namespace) -> int:
    """Prints every contender, and why those that cannot run here cannot."""
    console = make_console()
    device = pick_device(args.device)
    chosen = default_names(device)
    table = make_table("")
    for column in ("name", "what it is", "role", "needs", "here", "measured by default"):
        table.add_column(column, overflow="fold")
    for contender in CONTENDERS.values():
        missing = contender.missing(device)
        table.add_row(
            contender.name,
            contender.title,
            contender.role,
            contender.needs,
            Text(missing, style="dim") if missing else Text("yes", style="green"),
            "yes" if contender.name in chosen else "no",
        )
    console.print(table)
    return 0


RUN = {
    "speed": run_speed,
    "features": run_features,
    "cycles": cycles_command.run_cycles,
    "ladder": run_ladder,
    "steps": optimisation_command.run_steps,
    "accuracy": run_accuracy,
    "robustness": run_robustness,
    "decode": decode_command.run_decode,
    "experiments": experiments_command.run_experiments,
    "memory": run_memory,
    "overhead": run_overhead,
    "compare": run_compare,
    "plot": run_plot,
    "contenders": run_contenders,
}
