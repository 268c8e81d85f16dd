"""`accuracy`: errors against float64, and the rule of docs/design.md applied to them.

The rule: the error of our output and gradients is at most that of the best peer on the same inputs,
and at most twice that of plain PyTorch in the same dtype. The first part compares root mean square
errors, with 10 % for the luck of one draw; the second compares both the root mean square and the
largest error. The LSE, which few peers return, is held to the second part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..reference import attention_reference, attention_varlen_reference
from .contenders import OURS, PEER, Contender
from .contenders.base import Attention
from .inputs import Inputs, make_inputs
from .points import Point
from .results import Row
from .steps import Deadline, attempt, cannot_run, free_memory, measuring
from .tables import make_table, print_reasons, titled

TENSORS = ("out", "lse", "dq", "dk", "dv")
PEER_SLACK = 1.1
PLAIN_FACTOR = 2.0

Tensors = dict[str, torch.Tensor]


def truth(point: Point, inputs: Inputs) -> Tensors:
    """Output, LSE and gradients by the direct formula in float64, from the rounded inputs."""
    q, k, v = leaves = [x.detach().double().requires_grad_() for x in inputs.leaves]
    options: dict[str, Any] = {
        "causal": point.causal,
        "window": tuple(point.window) if point.window else None,
        "softcap": point.softcap or None,
        "return_lse": True,
    }
    if inputs.cu_seqlens is None:
        out, lse = attention_reference(q, k, v, **options)
    else:
        offsets = inputs.cu_seqlens
        out, lse = attention_varlen_reference(q, k, v, offsets, offsets, **options)
    grads = torch.autograd.grad(out, leaves, inputs.grad_out.double())
    return dict(zip(TENSORS, (out.detach(), lse.detach(), *grads), strict=True))


def errors(result: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Root mean square and largest error, each relative to the same measure of the truth."""
    if result.shape != expected.shape:
        raise ValueError(f"shape is {list(result.shape)}, expected {list(expected.shape)}")
    result = result.detach().double()
    seen = torch.isfinite(expected)  # a row without keys has LSE -inf, which must match exactly
    if not torch.equal(torch.isfinite(result), seen):
        raise ValueError("infinite or not a number where the float64 value is finite")
    difference, expected = (result - expected)[seen], expected[seen]
    return {
        "rms_error": float(difference.square().mean().sqrt() / expected.square().mean().sqrt()),
        "max_error": float(difference.abs().max() / expected.abs().max()),
    }


def measure(
    points: Iterable[Point],
    contenders: Sequence[Contender],
    distributions: Sequence[str],
    device: torch.device,
    deadline: Deadline,
    done: Callable[[list[Row]], None],
) -> None:
    """Rows of one point and distribution at a time, for every contender and tensor."""
    for point in points:
        for distribution in distributions:
            inputs = make_inputs(point, device, distribution)
            expected, reason = attempt(truth, point, inputs)
            rows: list[Row] = []
            for contender in contenders:
                found: dict[str, dict[str, float]] = {}
                late = deadline.passed()
                reasons = dict.fromkeys(TENSORS, late or f"no float64 reference: {reason}")
                if expected is not None and not late:
                    found, reasons = _contender_errors(contender, point, inputs, expected, device)
                rows += _rows(point, contender, distribution, found, reasons, device)
            done(rows)
            del inputs, expected
            free_memory()


def _contender_errors(
    contender: Contender, point: Point, inputs: Inputs, expected: Tensors, device: torch.device
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """(errors by tensor, reasons by tensor) of one contender; output, LSE and gradients fail
    apart."""
    found: dict[str, dict[str, float]] = {}
    reasons: dict[str, str] = {}

    def compare(name: str, result: torch.Tensor) -> None:
        value, reason = attempt(errors, result, expected[name])
        if value is None:
            reasons[name] = reason
        else:
            found[name] = value

    @cache
    def call() -> Attention:
        return contender.build(point, inputs)

    def forward() -> None:
        compare("out", call()(*inputs.detached))

    def lse() -> None:
        compare("lse", contender.build_with_lse(point, inputs)(*inputs.detached)[1])

    def gradients() -> None:
        out = call()(*inputs.leaves)
        for name, grad in zip(
            ("dq", "dk", "dv"),
            torch.autograd.grad(out, inputs.leaves, inputs.grad_out),
            strict=True,
        ):
            compare(name, grad)

    parts = (("fwd", ("out",), forward), ("bwd", TENSORS[2:], gradients), ("fwd", ("lse",), lse))
    with measuring(contender, point):
        for direction, names, action in parts:
            reason = cannot_run(contender, point, direction, device) or attempt(action)[1]
            reasons |= dict.fromkeys(names, reason) if reason else {}
    return found, reasons


def _rows(
    point: Point,
    contender: Contender,
    distribution: str,
    found: dict[str, dict[str, float]],
    reasons: dict[str, str],
    device: torch.device,
) -> list[Row]:
    place = " --device cpu" if device.type == "cpu" else ""
    command = (
        f"python -m cute_attention.bench accuracy {' '.join(point.arguments())} "
        f"--inputs {distribution}{place}"
    )
    return [
        Row(
            point=point,
            contender=contender.name,
            role=contender.role,
            what=name,
            case=distribution,
            metrics=found.get(name, {}),
            reason="" if name in found else reasons[name],
            command=command,
        )
        for name in TENSORS
    ]


@dataclass(frozen=True)
class Verdict:
    """One of our rows held against the rule; `broken` says how it fails, empty where it passes."""

    row: Row
    to_plain: float | None  # rms error as a multiple of plain PyTorch's
    to_peer: float | None  # and of the best peer's
    peer: str
    broken: str


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The rule applied to every row of ours."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.metrics:
            groups.setdefault((row.point, row.what, row.case), []).append(row)
    found = []
    for group in groups.values():
        plain = next((row for row in group if row.contender == "plain"), None)
        peers = [row for row in group if row.role == PEER]
        peer = min(peers, key=lambda row: row.metrics["rms_error"], default=None)
        found += [_judge(row, plain, peer) for row in group if row.role == OURS]
    return found


def _times(row: Row, other: Row | None, metric: str) -> float | None:
    if other is None or other.metrics[metric] == 0:
        return None
    return row.metrics[metric] / other.metrics[metric]


def _judge(row: Row, plain: Row | None, peer: Row | None) -> Verdict:
    to_plain, to_peer = _times(row, plain, "rms_error"), _times(row, peer, "rms_error")
    largest = _times(row, plain, "max_error")
    broken = []
    for name, value in (("rms", to_plain), ("largest", largest)):
        if value is not None and value > PLAIN_FACTOR:
            broken.append(f"{name} error {value:.2f}x plain PyTorch's")
    if to_peer is not None and to_peer > PEER_SLACK and row.what != "lse":
        broken.append(f"rms error {to_peer:.2f}x the best peer's")
    name = peer.contender if peer is not None else ""
    return Verdict(row, to_plain, to_peer, name, "; ".join(broken))


def accuracy_table(point: Point, case: str, rows: Sequence[Row]) -> Table:
    title = f"{point.text()}, {case} inputs: error against float64, rms (largest)"
    table = make_table(title)
    table.add_column("contender")
    for name in TENSORS:
        table.add_column(name, justify="right")
    for contender in dict.fromkeys(row.contender for row in rows if row.metrics):
        found = {row.what: row.metrics for row in rows if row.contender == contender}
        cells = [
            f"{m['rms_error']:.2e} ({m['max_error']:.1e})" if (m := found[name]) else "-"
            for name in TENSORS
        ]
        table.add_row(titled(contender), *cells)
    return table


def print_accuracy(console: Console, rows: Sequence[Row]) -> bool:
    """Tables and verdicts; True where nothing of ours breaks the rule."""
    for point in dict.fromkeys(row.point for row in rows):
        for case in dict.fromkeys(row.case for row in rows):
            part = [row for row in rows if row.point == point and row.case == case]
            if any(row.metrics for row in part):
                console.print()
                console.print(accuracy_table(point, case, part))
    print_reasons(console, rows)
    judged = verdicts(rows)
    broken = [verdict for verdict in judged if verdict.broken]
    console.print()
    for verdict in broken:
        row = verdict.row
        place = f"{titled(row.contender)}, {row.what}, {row.case}, {row.point.text()}"
        console.print(Text(f"FAIL: {place}: {verdict.broken}", style="bold red"))
    if judged and not broken:
        plain = max((v.to_plain for v in judged if v.to_plain is not None), default=None)
        text = f"PASS: {len(judged)} errors of ours keep the rule"
        text += f", at most {plain:.2f}x plain PyTorch's" if plain is not None else ""
        console.print(Text(text, style="bold green"))
    return not broken
