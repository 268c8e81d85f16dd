"""What stops the layout lab, with what to do about it."""

from __future__ import annotations


class LayoutError(RuntimeError):
    """The layouts of a row cannot be had: no such row, no compiler, no headers, or C++ refuses."""
