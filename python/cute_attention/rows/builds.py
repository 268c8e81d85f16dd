"""Several rows compiled side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError
from ..native import build
from ..native.build import Source
from .row import Row

_MOST_JOBS = 16  # an nvcc takes up to 4 GB of memory


@dataclass(frozen=True)
class Built:
    """What came of compiling a row."""

    row: Row
    name: str = ""  # of its kernel
    path: Path | None = None  # of its library in the cache; None where it is loaded already
    seconds: float = 0.0
    error: str = ""  # why there is none


def default_jobs() -> int:
    """How many compilers run at a time where nobody says."""
    return min(os.cpu_count() or 1, _MOST_JOBS)


def build_all(
    rows: Sequence[Row],
    chips: tuple[int, ...],
    jobs: int,
    limit_s: float | None = None,
    done: Callable[[Built], None] = lambda built: None,
) -> list[Built]:
    """Compiles rows, at most `jobs` at a time, and loads none. What is in the cache is not compiled
    again.

    Args:
        rows: in the order in which they are begun.
        chips: compute capabilities that sm80 rows get machine code for.
        jobs: how many compilers run at a time.
        limit_s: none is begun after so many seconds.
        done: is given each as it is finished.

    Returns:
        What came of each, in order. One that fails leaves the others alone.
    """
    begun = time.monotonic()

    def build_one(row: Row) -> Built:
        start = time.monotonic()
        if limit_s is not None and start - begun > limit_s:
            return Built(row, error=f"not begun within {limit_s:.0f} s")
        try:
            name, path = build.build(Source(row.columns, chips), is_study=True)
        except BuildError as error:
            return Built(row, seconds=time.monotonic() - start, error=str(error))
        return Built(row, name, path, time.monotonic() - start)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            found = []
            for built in pool.map(build_one, rows):
                done(built)
                found.append(built)
        except BaseException:  # such as an interrupt: what is not begun is not begun any more
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found
