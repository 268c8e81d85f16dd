"""The error that ends a command of the layout lab; its message says what to do."""

from __future__ import annotations


class LayoutError(RuntimeError):
    """The layouts of a row cannot be had: no such row, no compiler, no headers, or C++ refuses."""


class RefusedRow(LayoutError):
    """C++ refuses the row: an assertion of the kernels does not hold, or they do not compile."""
