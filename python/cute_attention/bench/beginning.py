"""How subcommands begin: the machine in words, who cannot run on it, and how speed is measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from rich.console import Console

from .contenders import Contender, select
from .machine import Environment, describe, pick_device
from .speed import Settings


def begin(args: argparse.Namespace, console: Console) -> tuple[torch.device, Environment]:
    """The device and what is known of it, which is printed."""
    device = pick_device(args.device)
    environment = describe(device)
    versions = f"torch {environment.torch}"
    if environment.driver:
        versions += f", driver {environment.driver}, CUDA {environment.cuda}"
    package = environment.package or "not installed"
    console.print(f"{environment.device}; {versions}; cute-attention {package}")
    if device.type == "cuda":
        console.print(environment.peak_text())
    return device, environment


def report_absent(
    contenders: Sequence[Contender],
    device: torch.device,
    args: argparse.Namespace,
    console: Console,
) -> dict[str, str]:
    """The contenders that this machine cannot run at all, by name with the reason; prints them."""
    absent = {c.name: why for c in contenders if (why := c.missing(device))}
    if not args.quiet:
        for reason in dict.fromkeys(absent.values()):
            who = ", ".join(name for name, why in absent.items() if why == reason)
            console.print(f"not measured: {who}: {reason}")
    return absent


def speed_settings(
    args: argparse.Namespace, device: torch.device, environment: Environment, memory: bool
) -> Settings:
    return Settings(
        device=device,
        contenders=select(args.contenders, device),
        directions=args.direction,
        rounds=args.rounds,
        time_ms=args.time_ms,
        limit_s=args.limit_s,
        peak_tflops=environment.peak_tflops,
        memory=memory,
        seed=args.seed,
    )
