"""Packages that are measured where they are installed: flash-attn 2, 3 and 4, xformers."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, ClassVar

import torch

from ..inputs import Inputs
from ..points import Point
from . import flash_attn_3
from .base import Attention, CannotRun, Contender, LseOnRequest, needs_gpu, reason_for


class PackageContender(Contender):
    """A contender that lives in a module of its own."""

    module: ClassVar[str]
    attribute: ClassVar[str]

    def missing(self, device: torch.device) -> str | None:
        gpu = needs_gpu(device)
        if gpu:
            return gpu
        try:
            getattr(self._package(), self.attribute)
        except (ModuleNotFoundError, AttributeError) as error:
            return f"not installed ({error})"
        except Exception as error:  # a package built for another CUDA or torch may raise anything
            return f"installed, but its import fails: {reason_for(error)}"
        return None

    def _package(self) -> Any:
        """The module that has the contender's functions."""
        return importlib.import_module(self.module)


class FlashAttn(LseOnRequest, PackageContender):
    """The functions of the flash-attn packages. They have the same names, but not all arguments are
    the same."""

    attribute = "flash_attn_func"
    features = frozenset({"softcap"})
    unbounded: ClassVar[int | None] = -1  # how the package writes an open side of a window
    # What a call without gradient is given beside, where the function takes it.
    inference: ClassVar[dict[str, Any]] = {}

    def _options(self, function: Any, point: Point, inputs: Inputs) -> dict[str, Any]:
        """The arguments of a point that differ from the defaults. Raises CannotRun where the
        installed version does not take one of them."""
        left, right = point.bounds
        causal = right == 0
        options: dict[str, Any] = {}
        if causal:
            options["causal"] = True
        if left is not None or (right is not None and not causal):
            sides = (self.unbounded if x is None else x for x in (left, right))
            options["window_size"] = tuple(sides)
        if point.softcap:
            options["softcap"] = point.softcap
        if point.dropout:
            options["dropout_p"] = point.dropout
        if inputs.alibi_slopes is not None:
            options["alibi_slopes"] = inputs.alibi_slopes
        if inputs.sink is not None:
            options["learnable_sink"] = inputs.sink.detach().to(inputs.q.dtype)
        if point.deterministic:
            options["deterministic"] = True
        parameters = inspect.signature(function).parameters
        for name in options:
            if name not in parameters:
                raise CannotRun(f"{self.title} as installed takes no {name}")
        return options

    def _build(self, point: Point, inputs: Inputs, want_lse: bool) -> Any:
        module = self._package()
        function = module.flash_attn_varlen_func if point.varlen else module.flash_attn_func
        parameters = inspect.signature(function).parameters
        options = self._options(function, point, inputs)
        if want_lse:
            switch = next((x for x in ("return_attn_probs", "return_lse") if x in parameters), None)
            if switch is not None:
                options[switch] = True
        if point.varlen:
            options |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
            longest = {"max_seqlen_q": inputs.max_seqlen, "max_seqlen_k": inputs.max_seqlen}
            options |= {name: n for name, n in longest.items() if name in parameters}
        inference = {name: x for name, x in self.inference.items() if name in parameters}
        without_gradient = options | inference

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            recorded = q.requires_grad and torch.is_grad_enabled()
            result = function(q, k, v, **(options if recorded else without_gradient))
            if want_lse:
                return result[0], result[1]
            return result[0] if isinstance(result, tuple) else result

        return call


class FlashAttn2(FlashAttn):
    name = "fa2"
    title = "FlashAttention-2"
    needs = "pip install flash-attn"
    module = "flash_attn"
    features = frozenset({"softcap", "alibi", "dropout"})


class FlashAttn3(FlashAttn):
    """The package where it is installed, or its library alone where the environment names one."""

    name = "fa3"
    title = "FlashAttention-3"
    needs = f"module flash_attn_interface, or its library alone, named by {flash_attn_3.VARIABLE}"
    module = "flash_attn_interface"
    inference: ClassVar[dict[str, Any]] = {"num_splits": 0}  # as many parts of the keys as it likes

    def _package(self) -> Any:
        path = flash_attn_3.library()
        if path is None:
            return super()._package()
        flash_attn_3.load(path)
        return flash_attn_3


class FlashAttn4(FlashAttn):
    name = "fa4"
    title = "FlashAttention-4"
    needs = "pip install flash-attn-4 (module flash_attn.cute)"
    module = "flash_attn.cute"
    features = frozenset({"softcap", "sink"})
    unbounded = None

    def refuses(self, point: Point, direction: str) -> str | None:
        if point.sink and direction != "fwd":
            return "its sink is measured in the forward alone"
        return super().refuses(point, direction)


class Xformers(PackageContender):
    name = "xformers"
    title = "xFormers"
    needs = "pip install xformers"
    module = "xformers.ops"
    attribute = "memory_efficient_attention"
    features = frozenset({"dropout"})

    def refuses(self, point: Point, direction: str) -> str | None:
        if point.mask not in ("full", "causal"):
            return "not measured with windows"
        if point.deterministic and direction != "fwd":
            return "memory_efficient_attention has no deterministic switch"
        return None

    def build(self, point: Point, inputs: Inputs) -> Attention:
        ops = importlib.import_module("xformers.ops")
        bias = self._bias(point)
        group = point.heads // point.heads_kv

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if point.varlen:
                q, k, v = q[None], k[None], v[None]
            # xformers takes grouped heads as a fifth dimension, with k and v expanded.
            if group > 1:
                q = q.unflatten(2, (-1, group))
                k, v = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (k, v))
            out: torch.Tensor = ops.memory_efficient_attention(
                q, k, v, attn_bias=bias, p=point.dropout
            )
            out = out.flatten(2, 3) if group > 1 else out
            return out[0] if point.varlen else out

        return call

    def _bias(self, point: Point) -> Any:
        biases = importlib.import_module("xformers.ops.fmha.attn_bias")
        if point.varlen:
            bias = biases.BlockDiagonalMask.from_seqlens(list(point.lengths))
            return bias.make_causal() if point.mask == "causal" else bias
        if point.mask == "full":
            return None
        square = point.seqlen_q == point.seqlen_k
        return (
            biases.LowerTriangularMask() if square else biases.LowerTriangularFromBottomRightMask()
        )
