"""`accuracy`: errors against float64, over several draws of each kind of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from ..semantics.formula import attention_reference, attention_varlen_reference
from .again import again
from .contenders import Contender
from .contenders.base import Attention
from .inputs import TORCH_DTYPES, Inputs, make_inputs
from .points import Point
from .results import Row
from .steps import Deadline, attempt, cannot_run, free_memory, measuring

TENSORS = ("out", "lse", "dq", "dk", "dv")

GRADED = ("out", "dq", "dk", "dv")  # results in the dtype of the inputs

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


def rounding(point: Point, expected: Tensors) -> dict[str, dict[str, float]]:
    """The errors that remain where a result is exact and only rounded to the dtype. The LSE is
    rounded to fp32."""
    dtype = TORCH_DTYPES[point.dtype]
    return {name: errors(expected[name].to(dtype), expected[name]) for name in GRADED}


class _Draws:
    """What one contender did over the draws of a point and distribution."""

    def __init__(self) -> None:
        self.found: dict[str, list[dict[str, float]]] = {name: [] for name in TENSORS}
        self.reasons: dict[str, str] = {}

    def add(
        self,
        found: dict[str, dict[str, float]],
        reasons: dict[str, str],
        rounded: dict[str, dict[str, float]],
    ) -> None:
        for name, metrics in found.items():
            shares = {}
            for kind in ("rms", "max"):
                if name in rounded and rounded[name][f"{kind}_error"]:
                    share = metrics[f"{kind}_error"] / rounded[name][f"{kind}_error"]
                    shares[f"{kind}_share"] = share
            self.found[name].append({**metrics, **shares})
        self.reasons |= reasons

    def metrics(self, name: str) -> dict[str, float]:
        """Means over the draws; nothing where one of them failed."""
        draws = self.found[name]
        if name in self.reasons or not draws:
            return {}
        keys = [key for key in draws[0] if all(key in draw for draw in draws)]
        return {key: sum(draw[key] for draw in draws) / len(draws) for key in keys}

    def samples(self, name: str, metric: str) -> tuple[float, ...]:
        return tuple(draw[metric] for draw in self.found[name])


def measure(
    points: Iterable[Point],
    contenders: Sequence[Contender],
    distributions: Sequence[str],
    device: torch.device,
    deadline: Deadline,
    done: Callable[[list[Row]], None],
    draws: int = 1,
) -> None:
    """Measures every point with every distribution of inputs; `done` receives the rows of one point
    and distribution at a time, one for each contender and tensor."""
    for point in points:
        for distribution in distributions:
            results = {contender.name: _Draws() for contender in contenders}
            late = ""
            for draw in range(draws):
                late = deadline.passed()
                if late:
                    break
                _measure_draw(point, contenders, distribution, draw, device, results)
            rows: list[Row] = []
            for contender in contenders:
                rows += _rows(point, contender, distribution, results[contender.name], late, device)
            done(rows)
            free_memory()


def _measure_draw(
    point: Point,
    contenders: Sequence[Contender],
    distribution: str,
    draw: int,
    device: torch.device,
    results: dict[str, _Draws],
) -> None:
    inputs = make_inputs(point, device, distribution, seed=draw)
    expected, reason = attempt(truth, point, inputs)
    rounded = rounding(point, expected) if expected is not None else {}
    for contender in contenders:
        found: dict[str, dict[str, float]] = {}
        reasons = dict.fromkeys(TENSORS, f"no float64 reference: {reason}")
        if expected is not None:
            found, reasons = _contender_errors(contender, point, inputs, expected, device)
        results[contender.name].add(found, reasons, rounded)


def _contender_errors(
    contender: Contender, point: Point, inputs: Inputs, expected: Tensors, device: torch.device
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The errors of one contender by tensor, and the reasons why tensors have none: the output, the
    LSE and the gradients are computed apart, and each may fail."""
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
    results: _Draws,
    late: str,
    device: torch.device,
) -> list[Row]:
    rows = []
    for name in TENSORS:
        metrics = results.metrics(name)
        rows.append(
            Row(
                point=point,
                contender=contender.name,
                role=contender.role,
                what=name,
                case=distribution,
                metrics=metrics,
                samples=results.samples(name, "rms_error") if metrics else (),
                max_samples=results.samples(name, "max_error") if metrics else (),
                reason="" if metrics else results.reasons.get(name) or late,
                command=again("accuracy", point, device, inputs=distribution),
            )
        )
    return rows
