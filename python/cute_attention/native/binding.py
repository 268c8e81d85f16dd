"""Loads the torch binding: the kernels behind the ops that `ops/schema.py` defines."""

from __future__ import annotations

import os
import threading

import torch

from . import core

_loaded = False
_lock = threading.Lock()


def _renew_lock() -> None:
    """In a forked child, where the thread that held the lock does not exist."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def binding_error() -> str:
    """Why the kernels cannot be called; empty where they can: the binding is loaded then.

    The first call loads it, whichever thread makes it. A failure is not remembered: the next call
    tries again.
    """
    global _loaded
    if _loaded:
        return ""
    path = core.torch_library()
    if path is None:
        return "the package was installed without its torch binding"
    with _lock:  # torch.ops.load_library changes the flags of dlopen for the whole process
        try:
            core.core()  # the binding links to it
            torch.ops.load_library(path)
        except OSError as error:
            return f"the torch binding does not load: {error}"
        _loaded = True
    return ""
