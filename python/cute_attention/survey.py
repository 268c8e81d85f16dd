"""What every backend says to a call: whether it serves it, and if not, why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import _binding, _core
from ._core import Candidate, Problem

KERNEL_BACKENDS = ("sm90", "sm80")  # fastest first
BACKENDS = (*KERNEL_BACKENDS, "reference")

# Elements of a row that kernels load at a time; ops.py fills other head dims up with zeros.
VECTOR = 8

DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


class Features(NamedTuple):
    """What a call asks of a kernel beside its dtype and head dims."""

    window_left: bool = False  # bounded
    window_right: bool = False
    varlen: bool = False
    softcap: bool = False
    bias: bool = False
    alibi: bool = False
    sink: bool = False
    dropout: bool = False
    nonpositive_scale: bool = False


def specialized(head_dim: int) -> int:
    """`head_dim` as a constant of a compiled graph, since the choice of a backend depends on it.

    torch.compile specialises on the bounds of a range.
    """
    return range(head_dim).stop


def holds(condition: bool) -> bool:
    """`condition` as a constant of a compiled graph.

    A comparison of symbolic numbers is none until a branch is taken on it.
    """
    if condition:  # noqa: SIM103
        return True
    return False


class Sizes(NamedTuple):
    """What decides between the rows of a backend, but not whether it serves."""

    batch: int = 1
    seqlen_q: int = 1024
    seqlen_k: int = 1024
    heads: int = 8
    heads_kv: int = 8
    window_left: int = 0
    window_right: int = 0
    softcap: float = 1.0


class Question(NamedTuple):
    direction: str  # "forward" or "backward"
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    features: Features
    device: torch.device
    sizes: Sizes = Sizes()
    deterministic: bool = False


@dataclass(frozen=True)
class Report:
    """The answer of one backend."""

    backend: str
    serves: bool
    reasons: tuple[str, ...]  # empty where it serves
    rows: tuple[Candidate, ...] = ()
    failed: bool = False  # it could not answer, and may answer otherwise the next time


def survey(question: Question) -> tuple[Report, ...]:
    """Every backend's report, fastest backend first.

    Raises:
        ValueError: a size that no kernel can be asked about.
    """
    problem = _problem(question)
    reference = Report("reference", True, ())
    kernels = (_kernel_report(backend, question, problem) for backend in KERNEL_BACKENDS)
    return (*kernels, reference)


def _kernel_report(backend: str, question: Question, problem: Problem) -> Report:
    on_gpu = question.device.type == "cuda"
    if not _core.available():
        return Report(backend, False, ("the package was installed without its kernel libraries",))
    try:
        candidates = _core.explain(problem, question.device.index if on_gpu else None)
    except RuntimeError as error:  # CUDA that torch can use and the kernel libraries cannot
        return Report(backend, False, (str(error),), failed=True)
    rows = tuple(row for row in candidates if row.backend == backend)
    if not rows:
        refused = [f"{entry.path}: {entry.error}" for entry in _core.libraries() if entry.error]
        return Report(backend, False, (f"no {backend} kernel is loaded", *refused))
    if not on_gpu:
        return Report(backend, False, (f"q is on {question.device}, not on a CUDA device",), rows)
    if unbound := _binding.binding_error():
        return Report(backend, False, (unbound,), rows, failed=True)
    if any(not row.reasons for row in rows):
        return Report(backend, True, (), rows)
    nearest = min(rows, key=lambda row: len(row.reasons))
    return Report(backend, False, tuple(nearest.reasons), rows)


def _whole_vectors(head_dim: int) -> int:
    return -(-head_dim // VECTOR) * VECTOR


def _problem(question: Question) -> Problem:
    features, sizes = question.features, question.sizes
    return Problem(
        direction=question.direction,
        dtype=DTYPE_NAMES[question.dtype],
        batch=sizes.batch,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        heads=sizes.heads,
        heads_kv=sizes.heads_kv,
        head_dim=_whole_vectors(question.head_dim),
        head_dim_v=_whole_vectors(question.head_dim_v),
        window_left=sizes.window_left if features.window_left else -1,
        window_right=sizes.window_right if features.window_right else -1,
        softcap=sizes.softcap if features.softcap else 0.0,
        varlen=features.varlen,
        bias=features.bias,
        alibi=features.alibi,
        sink=features.sink,
        dropout=features.dropout,
        nonpositive_scale=features.nonpositive_scale,
        deterministic=question.deterministic,
    )


def table(reports: tuple[Report, ...], chosen: str | None = None, estimates: bool = False) -> str:
    """One line per backend and per row: what it is, whether it serves, and every reason why not.

    Args:
        reports: of `survey`.
        chosen: the backend that runs, marked with an arrow.
        estimates: show the time that the cost model expects of a row.
    """
    lines = []
    for report in reports:
        mark = "->" if report.backend == chosen else "  "
        verdict = "serves" if report.serves else "; ".join(report.reasons)
        lines.append(f"{mark} {report.backend:<10} {verdict}")
        for row in report.rows:
            verdict = "; ".join(row.reasons) or "serves"
            time = f" (about {row.estimate_us:.1f} us)" if estimates and not row.reasons else ""
            mark = "->" if row.chosen and report.backend == chosen else "  "
            lines.append(f"     {mark} {row.name:<28} {verdict}{time}")
    return "\n".join(lines)
