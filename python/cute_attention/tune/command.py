"""`tune`: candidates found, compiled and measured, and the verdict."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.text import Text

from ..bench.beginning import report_absent
from ..bench.contenders import PEER, Contender, default_names, select
from ..bench.machine import Environment, describe, pick_device
from ..bench.options import Defaults, build_points
from ..bench.points import Point
from ..bench.results import Row
from ..bench.speed import Settings
from ..bench.steps import Deadline
from ..bench.tables import make_console
from ..errors import BuildError
from ..native import core, toolchain
from ..native.core import Device
from ..rows.builds import default_jobs
from ..rows.cost import typical_device
from . import folder as folders
from .compile import compile_missing
from .folder import Folder
from .measure import GpuUnusable, Turns, cannot_run_on, measure, merged, prepared, trial_of
from .plan import BUILD_SHARE, Search, candidates_for, search_of
from .show import plot_verdict, print_search, print_verdict
from .subjects import subjects_of
from .verdict import AHEAD, Verdict, lines_for_the_table, verdict_of

DEFAULTS = Defaults((128,), ("full", "causal"), (512, 4096), ("bf16",))
_SLOW = ("flex",)  # peers that compile for every point


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Runs the command; `words` are its arguments. Returns the exit code."""
    console = make_console()
    started = time.monotonic()
    device = pick_device(None) if torch.cuda.is_available() else None
    jobs = args.jobs or default_jobs()
    if args.measure_only:
        if more := _asked(words):
            raise ValueError(
                f"--measure-only measures what the folder of a search holds, so leave out {more[0]}"
            )
        found = folders.read(args.folder)
    else:
        found = _found(args, words, jobs, device, console)
        try:
            compile_missing(found, jobs, BUILD_SHARE * 60 * args.minutes)
        except BuildError as error:
            console.print(f"not compiled: {error}", soft_wrap=True)
    for search in found.searches:
        print_search(console, search)
    again = f"python -m cute_attention tune --measure-only --input {shlex.quote(str(found.path))}"
    if args.build_only:
        console.print(f"not measured, as --build-only asks. On a machine with a GPU:\n    {again}")
        return 0
    if device is None:
        console.print(f"not measured: PyTorch sees no GPU. On a machine with one:\n    {again}")
        return 0 if not args.measure_only else 1
    if reason := cannot_run_on(device, found.arch):
        console.print(f"not measured: {reason}")
        return 1
    left = max(60 * args.minutes - (time.monotonic() - started), 0.0)
    try:
        _measure(found, args, device, left, console)
    except GpuUnusable as lost:
        console.print(Text(str(lost), style="bold red"))
        return 1
    console.print(Text(f"    again: {_command(found)}", style="dim"), soft_wrap=True)
    return 0


def _command(found: Folder) -> str:
    return shlex.join(["python", "-m", "cute_attention", "tune", *found.arguments])


def _arch(asked: str | None, device: torch.device | None) -> str:
    """The family that is tuned: the native one of the GPU, where nobody says; without a GPU the one
    that runs on all."""
    if asked:
        return asked
    native = device is not None and torch.cuda.get_device_capability(device) == (9, 0)
    return "sm90" if native else "sm80"


def _found(
    args: argparse.Namespace,
    words: Sequence[str],
    jobs: int,
    device: torch.device | None,
    console: Console,
) -> Folder:
    """The search of the folder, where it is the one that the command asks for, or a new one."""
    sources = folders.sources_key()
    if (args.folder / folders.MANIFEST).is_file():
        before = folders.read(args.folder)
        if _asked(before.arguments) != _asked(_completed(words, before)):
            raise ValueError(
                f"{args.folder} holds another search ({_command(before)}): name another folder "
                "by --output, or remove it"
            )
        if before.sources != sources:
            raise ValueError(
                f"{args.folder} holds kernels of other headers: name another folder by --output, "
                "or remove it"
            )
        console.print(f"going on with the search in {args.folder}")
        return before
    arch = _arch(args.arch, device)
    gpu = _gpu(arch, device)
    points: dict[Point, Point] = {}  # named sets share some: each is measured once
    for point in build_points(args, DEFAULTS):
        points.setdefault(point.key(), point)
    subjects = subjects_of(points.values(), args.direction, arch, gpu.shared_memory_per_block)
    count = args.candidates or candidates_for(args.minutes, jobs, len(subjects))
    console.print(
        f"looking for {count} candidates for each of {len(subjects)} rows, estimated for {gpu.name}"
    )
    searches = [search_of(subject, args.row, count, gpu, jobs) for subject in subjects]
    chips = args.chips or toolchain.chips_here()
    found = Folder(args.folder, [], arch, tuple(chips), count, sources, searches)
    found.arguments = _completed(words, found)
    found.save()
    return found


def _completed(words: Sequence[str], found: Folder) -> list[str]:
    """The arguments with what they left to this machine and this time, so that they find the same
    search elsewhere."""
    chosen = {
        "--arch": found.arch,
        "--candidates": str(found.count),
        "--chips": ",".join(map(str, found.chips)),
    }
    given = {word.partition("=")[0] for word in words}
    more = [part for name, value in chosen.items() if name not in given for part in (name, value)]
    return [*words, *more]


# Options that say what is done now and how, and change nothing about what is searched.
_SWITCHES = ("--build-only", "--measure-only")
_WITH_VALUE = (
    "--input",
    "--jobs",
    "--minutes",
    "--output",
    "--peers",
    "--plot",
    "--rounds",
    "--time-ms",
)


def _asked(words: Sequence[str]) -> list[str]:
    """The arguments that decide what is searched."""
    kept, is_value = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value:
            is_value = False
        elif name in _WITH_VALUE:
            is_value = not equals
        elif name not in _SWITCHES:
            kept.append(word)
    return kept


def _gpu(arch: str, device: torch.device | None) -> Device:
    """The GPU for which rows are estimated: this machine's if it runs the family, else a typical
    one."""
    if device is None or cannot_run_on(device, arch):
        return typical_device(arch)
    return next((d for d in core.devices() if d.ordinal == device.index), typical_device(arch))


def _measure(
    found: Folder,
    args: argparse.Namespace,
    device: torch.device,
    limit_s: float,
    console: Console,
) -> None:
    environment = describe(device)
    console.print(f"{environment.device}; torch {environment.torch}, driver {environment.driver}")
    peers = _peers(args.peers, device)
    absent = report_absent(peers, device, argparse.Namespace(quiet=False), console)
    settings = Settings(
        device=device,
        contenders=[peer for peer in peers if peer.name not in absent],
        rounds=args.rounds,
        time_ms=args.time_ms,
        peak_tflops=environment.peak_tflops,
    )
    deadline = Deadline(limit_s)
    for index, search in enumerate(found.searches):
        verdict = _measure_search(found, search, settings, deadline, environment, console)
        if lines := lines_for_the_table(verdict, environment):
            console.print(f"for src/kernels/{search.subject.present.direction}.def:")
            console.print(Text(lines), soft_wrap=True)
        if args.plot and verdict.standings:
            path = args.plot
            if len(found.searches) > 1:
                path = path.with_stem(f"{path.stem}_{index + 1}")
            plot_verdict(path, verdict, environment.device)
            console.print(f"plot: {path}")


def _measure_search(
    found: Folder,
    search: Search,
    settings: Settings,
    deadline: Deadline,
    environment: Environment,
    console: Console,
) -> Verdict:
    """Measures what is not measured yet, saves after each point, and prints the figures."""
    name = environment.device
    ready = prepared(search, found, settings.device, name, trial_of)
    settings = dataclasses.replace(settings, directions=(search.subject.direction,))
    turns = Turns(
        settings, ready.present, _command(found), functools.partial(found.save_trial, name)
    )
    turns.deadline = deadline

    def done(rows: list[Row]) -> None:
        found.save_results(environment, merged(found.results(name), rows))
        first = rows[0].point
        measured = sum(1 for row in rows if row.metrics)
        console.print(f"measured: {first.text()}: {measured} of {len(rows)}")

    measure(search, ready, turns, found.results(name), done)
    results = found.results(name)
    reasons = ready.reasons | {
        f"{row.contender} at {row.point.text()}": row.reason
        for row in results
        if row.reason and row.contender in {c.name for c in ready.candidates}
    }
    verdict = verdict_of(search, results, ready.reasons)
    print_verdict(console, verdict, reasons)
    console.print(Text(verdict.text(), style="bold"), soft_wrap=True)
    for each in verdict.ahead_somewhere():
        ahead = {p.shape_text(): r for p, r in each.ratios.items() if r > AHEAD}
        points = ", ".join(f"{place} ({ratio:.2f})" for place, ratio in ahead.items())
        console.print(f"    ahead at some points: {each.entry.columns.name}: {points}")
    return verdict


def _peers(names: str | None, device: torch.device) -> list[Contender]:
    """The peers that are measured beside."""
    if names is not None:
        return select(names, device) if names else []
    chosen = [name for name in default_names(device) if name not in _SLOW]
    return [each for each in select(",".join(chosen), device) if each.role == PEER]
