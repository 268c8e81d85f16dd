"""Writes the support matrix of README.md from the kernel tables."""

from __future__ import annotations

import readme_section

from cute_attention.native import rows

if __name__ == "__main__":
    readme_section.replace("support matrix", rows.support_matrix(rows.table()))
