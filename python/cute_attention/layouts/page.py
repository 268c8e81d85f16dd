"""One self-contained HTML page of a kernel: pictures, proofs, and tiles to click through."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cute_attention.layouts.checks import check
from cute_attention.layouts.grid import COLOURS
from cute_attention.layouts.model import ELEMENT_BYTES, Kernel
from cute_attention.layouts.path import Element, steps
from cute_attention.layouts.pictures import VECTOR

_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Picture:
    """A drawn picture, as SVG."""

    name: str
    title: str
    svg: str


def _inline(picture: Picture) -> str:
    """An SVG as part of a page: without its XML header, and with identifiers that no other one
    has."""
    svg = picture.svg[picture.svg.index("<svg") :]
    for pattern, replacement in (
        (r'id="([^"]+)"', rf'id="{picture.name}-\1"'),
        (r'href="#([^"]+)"', rf'href="#{picture.name}-\1"'),
        (r"url\(#([^)]+)\)", rf"url(#{picture.name}-\1)"),
    ):
        svg = re.sub(pattern, replacement, svg)
    return svg


def _tiles(kernel: Kernel) -> dict[str, Any]:
    """What the page's script needs: for each 16-byte vector its byte address and its path in
    words."""
    found = {}
    for tensor, tile in kernel.tiles().items():
        rows, cols = tile.address.shape
        found[tensor] = {
            "rows": rows,
            "vectors": cols // VECTOR,
            "notation": tile.notation,
            "addresses": (tile.address[:, ::VECTOR] * ELEMENT_BYTES).tolist(),
            "paths": _paths(kernel, tensor, rows, cols),
        }
    return found


def _paths(kernel: Kernel, tensor: str, rows: int, cols: int) -> list[list[list[str]]]:
    """The steps of the first element of each vector, of the first 16 rows: later rows repeat
    them."""
    return [
        [list(steps(kernel, Element(tensor, row, col))) for col in range(0, cols, VECTOR)]
        for row in range(min(rows, 16))
    ]


def _proofs(kernel: Kernel) -> str:
    lines = []
    for result in check(kernel):
        verdict = "ok" if result.ok else "VIOLATED"
        cells = (verdict, result.rule, result.subject, result.number)
        row = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr class="{verdict.lower()}">{row}</tr>')
    return "\n".join(lines)


def page(kernel: Kernel, pictures: Sequence[Picture]) -> str:
    """The HTML of the page."""
    row = kernel.row
    m, n = kernel.tile
    stages = "" if kernel.part else f"{row.stages} stages, "  # those of a part are its own
    summary = (
        f"{row.arch} {row.direction}, {row.dtype}, head dim {row.head_dim}/{row.head_dim_v}, "
        f"tile {m} x {n}, {stages}{row.warps} warps, "
        f"{kernel.plan['bytes']} bytes of shared memory"
    )
    roles = "; ".join(f"{role['name']}: {role['threads']} threads" for role in kernel.roles)
    menu = "\n".join(
        f'<button data-show="{picture.name}">{html.escape(picture.title)}</button>'
        for picture in pictures
    )
    sections = "\n".join(
        f'<section id="section-{picture.name}">{_inline(picture)}</section>' for picture in pictures
    )
    data = {"tiles": _tiles(kernel), "colours": list(COLOURS)}
    parts = {
        "NAME": html.escape(kernel.name),
        "SUMMARY": html.escape(f"{summary}. {roles}"),
        "MENU": menu,
        "SECTIONS": sections,
        "PROOFS": _proofs(kernel),
        "DATA": json.dumps(data, separators=(",", ":"), default=np.ndarray.tolist),
    }
    text = _TEMPLATE.read_text()
    return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], text)
