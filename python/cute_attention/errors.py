"""The errors and the warning that callers may want to catch by name."""

from __future__ import annotations


class BackendError(NotImplementedError):
    """A backend was asked for by name and cannot serve the call.

    The message is the table that `cute_attention.explain` returns for the same call. Being a
    NotImplementedError it is also a RuntimeError.
    """


class FallbackWarning(UserWarning):
    """No kernel serves a call on a GPU, so the slower `reference` backend does; once per reason."""


class PageError(ValueError, RuntimeError):
    """A `block_table` is too short for a sequence, or names no page where one is needed.

    It is also a RuntimeError, which is what flash-attn raises.
    """


class OutOfPagesError(RuntimeError):
    """A `PagedCache` has no free page left. Nothing was changed: the call can be made again once
    sequences have been freed."""


class RowError(ValueError):
    """A row of `cute_attention.rows` cannot be right: the kernels' own assertions refuse it, or
    proofs about its layouts do not hold. The message names each with its number."""


class BuildError(RuntimeError):
    """A row of `cute_attention.rows` could not be compiled or loaded.

    The message says what is missing and how to get it, or is the compiler's own.
    """
