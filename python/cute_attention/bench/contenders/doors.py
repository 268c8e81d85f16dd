"""This package by the names of other libraries: what a caller gets who changed one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...integrations import sdpa
from .base import OURS, needs_gpu, reason_for
from .packages import FlashAttn
from .sdpa import Sdpa

_PACKAGE = sdpa.__name__.rpartition(".integrations.")[0]


class ByFlashAttn2(FlashAttn):
    name = "by_fa2"
    title = "ours, by flash-attn's names"
    role = OURS
    needs = "nothing"
    module = f"{_PACKAGE}.flash_attn"
    features = frozenset({"softcap", "alibi", "dropout"})

    def missing(self, device: torch.device) -> str | None:
        return None


class ByFlashAttn3(FlashAttn):
    name = "by_fa3"
    title = "ours, by FlashAttention-3's names"
    role = OURS
    needs = "nothing"
    module = f"{_PACKAGE}.flash_attn_interface"

    def missing(self, device: torch.device) -> str | None:
        return None


class BySdpa(Sdpa):
    """PyTorch's function while our provider is active. PyTorch's own kernels take the calls that
    none of ours serves."""

    name = "by_sdpa"
    title = "ours, by SDPA"
    role = OURS
    needs = "an NVIDIA GPU, PyTorch 2.11 or newer"
    backend = SDPBackend.FLASH_ATTENTION
    features = frozenset({"dropout"})
    dense_mask = False

    def missing(self, device: torch.device) -> str | None:
        if gpu := needs_gpu(device):
            return gpu
        try:
            sdpa.registration()
        except RuntimeError as error:
            return reason_for(error)
        return None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        sdpa.activate()
        try:
            with sdpa_kernel(self.backend):
                yield
        finally:
            torch.nn.attention.restore_flash_attention_impl()
