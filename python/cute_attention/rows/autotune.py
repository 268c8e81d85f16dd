"""The fastest kernel for a call at hand, searched once for each device."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack  # which torch depends on

from ..api import attention, attention_varlen
from ..arguments import problem_of
from ..checked import described
from ..checks import type_name
from ..dispatch.backends import whole_vectors
from ..dispatch.jit import best_rows, chip_of
from ..errors import BuildError, RowError
from ..native import build, core, kernel_cache, packages, toolchain
from ..native.build import Source
from ..native.core import Device, Kernel
from ..native.rows import TableRow
from ..options import AllOptions, documented
from ..problem import Problem
from ..timing import Timer, make_timer, median, turns
from .builds import build_all, default_jobs
from .candidates import proven, ranked, row_of
from .cost import typical_device
from .trial import fault_of

_ROUNDS = 5
_TIME_MS = 20.0  # of a kernel in a round
_NOISE = 1.01  # a row that is not faster by more than this does not replace that of the tables


@documented
def autotune(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    direction: str = "forward",
    candidates: int = 6,
    **options: Unpack[AllOptions],
) -> Kernel:
    """The fastest kernel for a call of `attention` or `attention_varlen`, of the row of the tables
    that serves it and of rows with other tiles, stages, warps and levels of ptxas.

    The first call of its kind on a device compiles the candidates, a minute each, several at a
    time; compares the results of each with attention in float64; and measures those that are right
    in turn, with an empty L2 cache. The answer is remembered in the cache of kernels, for this
    device, these sizes and options, these headers and this compiler, so the next call, also of
    another process, only loads the kernel. docs/tuning.md tells more.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]` on a GPU, or packed `[total_q, heads, head_dim]`.
        k: `[batch, seqlen_k, heads_kv, head_dim]`, or packed.
        v: `[batch, seqlen_k, heads_kv, head_dim_v]`, or packed.
        cu_seqlens_q: int32 `[batch + 1]` where packed.
        cu_seqlens_k: int32 `[batch + 1]` where packed.
        max_seqlen_q: the longest sequence of q where packed.
        max_seqlen_k: the longest sequence of k where packed.
        direction: "forward" or "backward".
        candidates: at most so many rows are compiled beside that of the tables.
        **options: those of `Options` in options.py.

    Returns:
        The kernel, for the argument `kernel` of `attention` and for `rows.use`.

    Raises:
        TypeError: as the call would.
        ValueError: as the call would; q is not on a GPU, `kernel` is given, or `direction` or
            `candidates` is none that can be.
        RowError: no row of the tables computes the call.
        BuildError: nvcc, the headers or the layout lab are missing, or the row of the tables cannot
            be compiled.

    Example:
        >>> import torch
        >>> from cute_attention import attention, rows
        >>> q = k = v = torch.randn(2, 197, 12, 64, dtype=torch.bfloat16)
        >>> if torch.cuda.is_available():
        ...     kernel = rows.autotune(q.cuda(), k.cuda(), v.cuda())
        ...     out = attention(q.cuda(), k.cuda(), v.cuda(), kernel=kernel)
    """
    _check(direction, candidates, options.get("kernel"))
    _, packing, given, call = described(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options
    )
    if q.device.type != "cuda":
        raise ValueError(f"autotune: q is on {q.device}, expected a CUDA device")
    problem = problem_of(call)._replace(direction=direction)
    present = present_row(problem, given["backend"])

    def step_of(kernel: Kernel) -> Callable[[], object]:
        options = {**given, "kernel": kernel, "backend": "auto", "return_lse": False}
        return _step(direction, (q, k, v), packing, options)

    return _remembered(present, problem, candidates, step_of)


def _check(direction: object, candidates: object, kernel: object) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("autotune: called in compiled code, expected before it is compiled")
    if direction not in ("forward", "backward"):
        raise ValueError(f"autotune: direction is {direction!r}, expected 'forward' or 'backward'")
    if type(candidates) is not int:
        raise TypeError(f"autotune: candidates is {type_name(candidates)}, expected an int")
    if candidates < 1:
        raise ValueError(f"autotune: candidates is {candidates}, expected at least 1")
    if kernel is not None:
        raise ValueError("autotune: kernel is given, expected None: it is what is searched")


def present_row(problem: Problem, backend: str = "auto") -> TableRow:
    """The row of the tables that would serve a problem on its device if all were installed.

    Raises:
        RowError: there is none.
    """
    assert problem.device is not None
    capability, shared_memory = chip_of(problem.device)
    vectors = problem._replace(
        head_dim=whole_vectors(problem.head_dim), head_dim_v=whole_vectors(problem.head_dim_v)
    )
    for family in packages.families_for(capability):
        if backend in ("auto", family) and (found := best_rows(vectors, family, shared_memory)):
            return found[0]
    raise RowError(
        f"no row of the tables computes the {problem.direction} of {problem.dtype}, head dims "
        f"{problem.head_dim} and {problem.head_dim_v}, with these features, on {problem.device} "
        f"(backend {backend!r})"
    )


def _step(
    direction: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    packing: tuple[Any, ...],
    options: dict[str, Any],
) -> Callable[[], object]:
    """What is timed: a forward, or a backward of an output that is computed here."""
    function: Callable[..., Tensor] = attention_varlen if packing else attention
    if direction == "forward":
        inputs = [tensor.detach() for tensor in tensors]

        def forward() -> Tensor:
            with torch.no_grad():
                return function(*inputs, *packing, **options)

        return forward
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves, *packing, **options)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def device_of(device: torch.device, arch: str) -> Device:
    """What the cost model reads of a GPU; a typical one where no kernel library tells."""
    return next((d for d in core.devices() if d.ordinal == device.index), typical_device(arch))


def _remembered(
    present: TableRow,
    problem: Problem,
    candidates: int,
    step_of: Callable[[Kernel], Callable[[], object]],
) -> Kernel:
    """The kernel that was found before, or that of a search now; of several processes one
    searches."""
    assert problem.device is not None
    chips = toolchain.chips_here()
    device = torch.cuda.get_device_name(problem.device)
    state = hashlib.sha256(build.key_of(Source(present, chips), toolchain.find()).encode())
    state.update(repr((device, problem._replace(device=None), candidates)).encode())
    path = kernel_cache.choice_path(state.hexdigest()[:24])

    def search(folder: Path) -> Path:
        found = _search(present, problem, candidates, step_of)
        file = folder / path.name
        file.write_text(json.dumps({"device": device, "call": repr(problem), **found}, indent=1))
        return file

    kernel_cache.obtain(path, search, lambda: build.say("waiting for another process that tunes"))
    columns = json.loads(path.read_text())["row"]
    columns["score_mods"] = tuple(columns["score_mods"])
    return row_of(TableRow(**columns)).build()


def _search(
    present: TableRow,
    problem: Problem,
    candidates: int,
    step_of: Callable[[Kernel], Callable[[], object]],
) -> dict[str, Any]:
    """The fastest row, and the medians of all that were measured, in ms."""
    assert problem.device is not None
    device = device_of(problem.device, present.arch)
    jobs = default_jobs()
    order, _ = ranked(present, [problem], device)
    rows = [candidate.row for candidate in proven(order, candidates, jobs).kept]
    trusted = row_of(present)
    errors = [built.error for built in build_all([trusted, *rows], toolchain.chips_here(), jobs)]
    if errors[0]:
        raise BuildError(errors[0])
    right = {trusted: trusted.build()}
    for row, error in zip(rows, errors[1:], strict=True):
        reason = error
        if not error:
            kernel = row.build()
            reason = fault_of(kernel, right[trusted], problem)
        if reason:
            warnings.warn(f"autotune: {row.name} is left out: {reason}", stacklevel=2)
        else:
            right[row] = kernel
    times = measured([step_of(kernel) for kernel in right.values()], problem.device)
    best = fastest(times)
    names = [row.name for row in right]
    return {
        "row": dataclasses.asdict([*right][best].columns),
        "times_ms": dict(zip(names, times, strict=True)),
    }


def measured(steps: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """The median time of each step in ms; they take turns."""
    timer: Timer = make_timer(device, _TIME_MS)
    plans = [timer.plan(step) for step in steps]
    rounds: list[list[float]] = [[] for _ in steps]
    for index in range(_ROUNDS):
        for i in turns(len(steps), index):
            rounds[i].append(median(timer.sample(steps[i], plans[i])))
    return [median(times) for times in rounds]


def fastest(times: Sequence[float]) -> int:
    """Which is the fastest; the first, that of the tables, unless another is faster by more than
    the noise."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[0] > _NOISE * times[best] else 0
