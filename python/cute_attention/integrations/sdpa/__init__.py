"""PyTorch's own attention through our kernels, by PyTorch's own registration (from 2.11 on).

    import cute_attention.integrations.sdpa                      # registers the name, no more
    torch.nn.attention.activate_flash_attention_impl("cute_attention")
    torch.nn.attention.restore_flash_attention_impl()            # PyTorch's kernels again

While it is active, `torch.nn.functional.scaled_dot_product_attention`,
`torch.nn.attention.varlen.varlen_attn` and nested tensors use our kernels. PyTorch chooses as ever
between its backends. FLASH_ATTENTION and EFFICIENT_ATTENTION are ours then, for the calls that a
kernel of ours serves, forward and backward; for all others they are PyTorch's kernels as before.
CUDNN_ATTENTION, which PyTorch would prefer on some GPUs, is switched off by PyTorch's own flag, and
set to what it was by the restore; `sdpa_kernel(SDPBackend.CUDNN_ATTENTION)` still asks for it.

What is ours is registered for the dispatch key of the device, below autograd, as PyTorch's own
providers of flash attention do it. So autograd, torch.compile, checkpoints and DTensor see the
operators of PyTorch that they know.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention

from .dense import (
    sdpa_efficient,
    sdpa_efficient_backward,
    sdpa_flash,
    sdpa_flash_backward,
)
from .shared import NotServed
from .varlen import flash, flash_backward, flash_into

NAME = "cute_attention"  # in PyTorch's list of implementations
# 2.10 registers and activates, but never restores.
_REGISTRATION = (
    "register_flash_attention_impl",
    "activate_flash_attention_impl",
    "restore_flash_attention_impl",
)
_DEVICES = ("CUDA", "CPU")  # dispatch keys; PyTorch has no such kernels for the CPU


def register() -> None:
    """Adds "cute_attention" to the implementations that
    `torch.nn.attention.activate_flash_attention_impl` knows. Importing this module does it, too.

    Raises:
        RuntimeError: PyTorch is older than 2.11.
    """
    registration().register_flash_attention_impl(NAME, register_fn=_Active)


def activate() -> None:
    """Makes PyTorch's attention use our kernels, for the whole process.

    Raises:
        RuntimeError: PyTorch is older than 2.11.
    """
    register()
    registration().activate_flash_attention_impl(NAME)


def registration() -> Any:
    """`torch.nn.attention`, where it has implementations to register.

    Raises:
        RuntimeError: it has none, or none that can be undone.
    """
    missing = _missing_registration()
    if missing:
        raise RuntimeError(
            f"cute_attention.integrations.sdpa needs PyTorch 2.11 or newer, and this is "
            f"{torch.__version__}: torch.nn.attention has no {missing[0]} "
            "(call cute_attention.attention instead)"
        )
    return torch.nn.attention


def _missing_registration() -> list[str]:
    return [name for name in _REGISTRATION if not hasattr(torch.nn.attention, name)]


class _Active:
    """Our kernels in PyTorch's dispatcher, until `remove`."""

    def __init__(self) -> None:
        self.library: Any = torch.library.Library("aten", "IMPL")
        for device in _DEVICES:
            for name, function in _IMPLEMENTATIONS.items():
                if hasattr(torch.ops.aten, name):  # one of them is younger than 2.11
                    self._implement(name, function, device)
        self.cudnn_was_on = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def _implement(self, name: str, function: Callable[..., Any], device: str) -> None:
        theirs = _kernel_of_pytorch(name, device)
        call = functools.partial(_ours_or_theirs, function, theirs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            self.library.impl(name, call, device, with_keyset=True)

    def remove(self) -> None:
        """What PyTorch calls to restore its own kernels."""
        if self.library is not None:
            self.library = None
            torch.backends.cuda.enable_cudnn_sdp(self.cudnn_was_on)


def _kernel_of_pytorch(name: str, device: str) -> Any:
    try:
        return torch.library.get_kernel(f"aten::{name}", device)
    except RuntimeError:  # there is none
        return None


def _ours_or_theirs(ours: Callable[..., Any], theirs: Any, keys: Any, *args: Any, **kw: Any) -> Any:
    """Ours where a kernel serves the call. Where none does: theirs, or the reference backend where
    PyTorch has no kernel either."""
    try:
        return ours(*args, **kw, only_kernels=theirs is not None)
    except NotServed:
        if theirs is None:
            raise
    return theirs.call_boxed(keys, *args, **kw)


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_flash,
    "_scaled_dot_product_flash_attention_backward": sdpa_flash_backward,
    "_scaled_dot_product_efficient_attention": sdpa_efficient,
    "_scaled_dot_product_efficient_attention_backward": sdpa_efficient_backward,
    "_flash_attention_forward": flash,
    "_flash_attention_forward_no_dropout_inplace": flash_into,
    "_flash_attention_backward": flash_backward,
}

if not _missing_registration():
    register()
