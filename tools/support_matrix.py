"""Writes the support matrix of README.md from the kernel tables."""

from __future__ import annotations

import re
from pathlib import Path

from cute_attention.native import rows

README = Path(__file__).resolve().parents[1] / "README.md"


def main() -> None:
    matrix = rows.support_matrix(rows.table())
    pattern = re.compile(r"(<!-- support matrix: .*?-->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = pattern.subn(lambda match: match[1] + matrix + match[2], README.read_text())
    if count != 1:
        raise SystemExit(f"{README} has {count} support matrices, expected 1")
    README.write_text(text)


if __name__ == "__main__":
    main()
