"""Loads the torch binding, once, at the first call that may need it."""

from __future__ import annotations

import functools

import torch

from . import _core


@functools.cache
def binding_error() -> str:
    """Why `torch.ops.cute_attention.forward` is missing; empty where it is there, loaded now."""
    path = _core.torch_library()
    if path is None:
        return "the package was installed without its torch binding"
    try:
        _core.core()  # the binding links to it
        torch.ops.load_library(path)
    except OSError as error:
        return f"the torch binding does not load: {error}"
    from .ops import fake_backward, fake_forward

    torch.library.register_fake("cute_attention::forward", fake_forward)
    torch.library.register_fake("cute_attention::backward", fake_backward)
    from .flops import register_kernel_formulas

    register_kernel_formulas()
    return ""
