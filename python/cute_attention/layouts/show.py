"""`show ROW`: every picture of a kernel as SVG and PNG, and one page with all of them."""

from __future__ import annotations

from pathlib import Path

from cute_attention.layouts.grid import save
from cute_attention.layouts.model import Kernel
from cute_attention.layouts.page import Picture, page
from cute_attention.layouts.pictures import pictures


def show(kernel: Kernel, folder: Path) -> list[Path]:
    """Writes the pictures and the page; returns the files, the page last."""
    files, drawn = [], []
    for name, title, created in pictures(kernel):
        saved = save(created, folder, f"{kernel.name}_{name}")
        files += saved
        drawn.append(Picture(name, title, saved[0].read_text()))
    html = folder / f"{kernel.name}.html"
    html.write_text(page(kernel, drawn))
    return [*files, html]
