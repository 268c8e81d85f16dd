"""`bench steps`: one forward kernel from plain to full, step by step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ..errors import BuildError
from ..native.core import Kernel
from . import kernel_folder, optimisation_kernels, optimisation_lab
from .again import again
from .beginning import begin
from .contenders import CONTENDERS, OURS, Contender
from .contenders.base import needs_gpu
from .contenders.ours import Ours
from .machine import Environment
from .optimisation_kernels import Figures
from .optimisation_report import print_steps
from .optimisations import HEAD_DIM, Step, chosen
from .options import Defaults, build_points
from .points import Point
from .report import Report, speed_lines
from .results import Row
from .speed import Bench, Case, Settings
from .tables import make_console

DIRECTION = "fwd"
PEERS = ("fa2", "flash")  # FlashAttention-2: its package, else PyTorch's copy of it
GPU = Defaults((HEAD_DIM,), ("full",), (4096,), ("bf16",), batch=4, heads=16)


class StepContender(Ours):
    """`attention(..., kernel=...)` with the kernel of a step."""

    needs = "a GPU and the step's kernel"
    kernel: Kernel

    def _options(self, point: Point, **extra: Any) -> dict[str, Any]:
        options = super()._options(point, **extra)
        return {**options, "backend": "auto", "kernel": self.kernel}

    def missing(self, device: torch.device) -> str | None:
        if gpu := needs_gpu(device):
            return gpu
        if self.kernel.arch == "sm90" and torch.cuda.get_device_capability(device) != (9, 0):
            return "needs a GPU of compute capability 9.0"
        return None


def contender_of(step: Step, kernel: Kernel) -> StepContender:
    members = {"name": step.name, "title": step.name, "kernel": kernel}
    made: StepContender = type("StepContender", (StepContender,), members)()
    return made


class Steps(Bench):
    """One run; every row carries the command that measures all steps again."""

    def _command(self, case: Case, direction: str) -> str:
        return again("steps", case.point, self.settings.device)


def run_steps(args: argparse.Namespace) -> int:
    console = make_console()
    steps = chosen(args.architectures)
    if args.build_only:
        return _build(steps, args, console)
    device, environment = begin(args, console)
    figures = _figures(steps, args, console)
    point = build_points(args, GPU)
    with Report("steps", args, environment, console, len(point)) as report:
        if device.type == "cuda":
            _measure(steps, point, figures, report, args, device, environment)
        else:
            reason = "needs an NVIDIA GPU"
            console.print(f"not measured: {reason}; what follows is predicted")
            report.add([_unmeasured(step, point[0], reason) for step in steps])
        report.rows[:] = [_with_figures(row, figures) for row in report.rows]
    print_steps(console, report.rows)
    if args.pictures:
        for file in optimisation_lab.draw(steps, args.pictures):
            console.print(f"picture: {file}")
    if args.plot:
        from .optimisation_chart import plot_steps

        plot_steps(args.plot, report.rows, environment.device)
        console.print(f"plot: {args.plot}")
    return 0


def _build(steps: Sequence[Step], args: argparse.Namespace, console: Console) -> int:
    """Builds all kernels into the folder, with what is known of them here."""
    if args.kernels is None:
        raise ValueError("--build-only needs --kernels DIR, where the libraries are put")
    args.kernels.mkdir(parents=True, exist_ok=True)
    figures = optimisation_kernels.read_figures(args.kernels)
    predicted, missing = optimisation_lab.predicted(steps)
    if missing:
        console.print(f"not predicted: {missing}")
    for step in steps:
        path = kernel_folder.build(step.row, args.kernels, args.chips)
        known = figures.get(step.row.name, {}) | predicted.get(step.row.name, {})
        figures[step.row.name] = known | optimisation_kernels.machine_code(path)
        optimisation_kernels.write_figures(args.kernels, figures)
        console.print(f"{step.name}: {path}")
    return 0


def _figures(
    steps: Sequence[Step], args: argparse.Namespace, console: Console
) -> dict[str, Figures]:
    """What is known without a GPU: from the folder of kernels, else from the layout lab."""
    found = optimisation_kernels.read_figures(args.kernels) if args.kernels else {}
    unknown = [step for step in steps if "conflicts" not in found.get(step.row.name, {})]
    if unknown:
        predicted, missing = optimisation_lab.predicted(unknown)
        if missing:
            console.print(f"not predicted: {missing}")
        for name, known in predicted.items():
            found[name] = found.get(name, {}) | known
    return found


def _kernel(step: Step, args: argparse.Namespace) -> Kernel:
    if args.kernels:
        return kernel_folder.load(step.row, args.kernels)
    return step.row.build(chips=args.chips)


def _measure(
    steps: Sequence[Step],
    points: Sequence[Point],
    figures: dict[str, Figures],
    report: Report,
    args: argparse.Namespace,
    device: torch.device,
    environment: Environment,
) -> None:
    """Measures all steps in turn with FlashAttention-2, and counts their instructions."""
    kernels: dict[str, Kernel] = {}
    reasons: dict[str, str] = {}
    for step in steps:
        try:
            kernels[step.row.name] = _kernel(step, args)
        except BuildError as error:
            reasons[step.name] = str(error).splitlines()[0]
    built = [step for step in steps if step.name not in reasons]
    contenders: list[Contender] = [contender_of(step, kernels[step.row.name]) for step in built]
    peer = next((name for name in PEERS if not CONTENDERS[name].missing(device)), None)
    if peer:
        contenders.append(CONTENDERS[peer])
    settings = Settings(
        device,
        contenders,
        rounds=args.rounds,
        time_ms=args.time_ms,
        limit_s=args.limit_s,
        peak_tflops=environment.peak_tflops,
    )
    titles = {step.name: step.row.name for step in steps}

    def done(rows: list[Row]) -> None:
        named = [replace(row, case=titles.get(row.contender, "")) for row in rows]
        left_out = [
            _unmeasured(step, rows[0].point, reasons[step.name])
            for step in steps
            if step.name in reasons
        ]
        report.add([*named, *left_out], speed_lines(report, rows))

    Steps(settings).measure(points, done)
    if args.kernels and kernels:
        report.save()  # Nsight Compute may take long
        files = [
            path for step in built for path in kernel_folder.libraries_of(step.row, args.kernels)
        ]
        counters, missing = optimisation_lab.counted(kernels, files)
        if missing:
            report.console.print(Text(f"instructions not counted: {missing}", style="dim"))
        for name, known in counters.items():
            figures[name] = figures.get(name, {}) | known


def _unmeasured(step: Step, point: Point, reason: str) -> Row:
    return Row(point, step.name, OURS, DIRECTION, case=step.row.name, reason=reason)


def _with_figures(row: Row, figures: dict[str, Figures]) -> Row:
    return replace(row, metrics={**figures.get(row.case, {}), **row.metrics})
