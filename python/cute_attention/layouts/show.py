"""`show ROW`: every picture of a kernel as SVG and PNG, and one page with all of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

from cute_attention.layouts.grid import save
from cute_attention.layouts.model import Kernel
from cute_attention.layouts.page import Picture, page
from cute_attention.layouts.pictures import Sketch, sketches

_work: list[tuple[Sketch, Path, str]] = []  # worker processes inherit this when they fork


def _draw(index: int) -> list[Path]:
    sketch, folder, name = _work[index]
    return save(sketch.draw(sketch.title), folder, name)


def show(kernel: Kernel, folder: Path, jobs: int | None = None) -> list[Path]:
    """Writes the pictures and the page; returns the files, the page last."""
    wanted = sketches(kernel)
    _work[:] = [(sketch, folder, f"{kernel.file_name}_{sketch.name}") for sketch in wanted]
    saved = list(_saved(jobs or min(os.cpu_count() or 1, 8)))
    drawn = [
        Picture(sketch.name, sketch.title, files[0].read_text())
        for sketch, files in zip(wanted, saved, strict=True)
    ]
    html = folder / f"{kernel.file_name}.html"
    html.write_text(page(kernel, drawn))
    return [*(file for files in saved for file in files), html]


def _saved(jobs: int) -> Iterator[list[Path]]:
    """Draws the pictures in several processes, which are forks of this one; returns the files of
    each."""
    if jobs > 1 and "fork" in multiprocessing.get_all_start_methods():
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            yield from pool.imap(_draw, range(len(_work)))
    else:
        yield from map(_draw, range(len(_work)))
