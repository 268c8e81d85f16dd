"""Replaces a section of README.md, or of a page of docs/, that a tool writes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def replace(name: str, text: str, readme: Path = ROOT / "README.md") -> None:
    """Puts `text` between `<!-- name: ... -->` and the next `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
    changed, count = pattern.subn(lambda match: match[1] + text + match[2], readme.read_text())
    if count != 1:
        raise SystemExit(f"{readme} has {count} sections {name!r}, expected 1")
    readme.write_text(changed)
