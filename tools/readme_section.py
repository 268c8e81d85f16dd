"""Replaces a section of README.md, or of a page of docs/, that a tool writes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: [^>]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)


def read(name: str, readme: Path) -> str:
    """What stands between `<!-- name: ... -->` and the next `<!-- end -->`."""
    found = _pattern(name).search(readme.read_text())
    if not found:
        raise SystemExit(f"{readme} has no section {name!r}")
    return found[2]


def replace(name: str, text: str, readme: Path = ROOT / "README.md") -> None:
    """Puts `text` between `<!-- name: ... -->` and the next `<!-- end -->`."""
    changed, count = _pattern(name).subn(
        lambda match: match[1] + text + match[3], readme.read_text()
    )
    if count != 1:
        raise SystemExit(f"{readme} has {count} sections {name!r}, expected 1")
    readme.write_text(changed)
