"""The layout lab's proofs about a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BuildError, RowError
from ..native.rows import TableRow

if TYPE_CHECKING:
    from ..layouts.checks import Report


def check(row: TableRow, include: Path | None) -> list[Report]:
    """`Row.check`."""
    try:
        from ..layouts import checks, errors, export, model
    except ModuleNotFoundError as error:
        raise BuildError(
            f'check: {error}: pip install "cute-attention[layouts]" adds it; of it, '
            "nvidia-cutlass==4.2.0.0 will do without its dependencies (pip install --no-deps)"
        ) from error
    try:
        reports = checks.check_all(model.kernels([export.Request(row, include=include)]))
    except errors.RefusedRow as error:
        raise RowError(str(error)) from error
    except errors.LayoutError as error:
        raise BuildError(f"check: {error}") from error
    violated = [
        f"  {result.rule}: {result.subject}: {result.number}"
        for report in reports
        for result in report.violations
    ]
    if violated:
        count = sum(len(report.results) for report in reports)
        lines = "\n".join(violated)
        raise RowError(f"{row.name}: {len(violated)} of {count} proofs do not hold\n{lines}")
    return reports


def registers_left(reports: Sequence[Report]) -> int | None:
    """The fewest registers that a thread of the kernels has beside its accumulators and operands;
    None where the compiler may take as many as it likes."""
    from ..layouts import limits

    found = (limits.registers_left(report.kernel) for report in reports)
    return min((left for left in found if left is not None), default=None)
