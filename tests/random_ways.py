"""The ways in which a random call is made: by our names or another library's, compiled, in a stream
of its own, in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cute_attention import (
    attention,
    attention_varlen,
    flash_attn,
    flash_attn_interface,
    use_backend,
)
from cute_attention.inference import attention_with_cache

_DOORS = {"flash_attn": flash_attn, "flash_attn_interface": flash_attn_interface}
# What options of ours are called by flash-attn and by FlashAttention-3.
_NAMES = {"scale": "softmax_scale", "window": "window_size"}
_CACHE_NAMES = {**_NAMES, "leftpad": "cache_leftpad"}
_INTEGERS = ("cache_seqlens", "block_table", "cache_batch_idx", "leftpad")


def attend(
    way: str,
    tensors: list[Tensor],
    packing: tuple[Any, ...],
    options: dict[str, Any],
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a dense call, or of a packed one."""
    if way in _DOORS:
        names = "flash_attn_varlen_func" if packing else "flash_attn_func"
        with use_backend(backend):
            results = getattr(_DOORS[way], names)(
                *tensors, *packing, **_renamed(options, _NAMES), return_attn_probs=True
            )
        return results[:2]
    function: Callable[..., Any] = attention_varlen if packing else attention
    if way == "compiled":
        function = compiled(function)
    return function(*tensors, *packing, **options, return_lse=True, backend=backend)


def attend_cache(way: str, given: dict[str, Any], backend: str) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call with a cache."""
    if way in _DOORS:
        names = dict(_CACHE_NAMES)
        if way == "flash_attn_interface":
            names["block_table"] = "page_table"
        unknown = ("batch_invariant", "max_seqlen_k")
        options = {name: value for name, value in given.items() if name not in unknown}
        for name in _INTEGERS:  # of 64 bits too
            if options.get(name) is not None:
                options[name] = options[name].long()
        with use_backend(backend):
            return _DOORS[way].flash_attn_with_kvcache(
                **_renamed(options, names), return_softmax_lse=True
            )
    function: Callable[..., Any] = attention_with_cache
    if way == "compiled":
        function = compiled(function)
    return function(**given, return_lse=True, backend=backend)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` through torch.compile, but for the code that Inductor would write."""
    torch._dynamo.reset()  # which compiles the same function a few times only
    return torch.compile(lambda *args, **given: function(*args, **given), backend="aot_eager")


def _renamed(options: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    found = {names.get(name, name): value for name, value in options.items()}
    if (window := found.get("window_size")) is not None:
        found["window_size"] = tuple(-1 if side is None else side for side in window)
    return found


def in_its_way(way: str, run: Callable[[], Any]) -> Any:
    """What `run` returns, tensors by name or in a tuple: in a stream of its own, or by a graph that
    is replayed into results full of NaN."""
    if way not in ("stream", "graph"):
        return run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = run()
    torch.cuda.current_stream().wait_stream(stream)
    if way == "stream":
        return results
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for result in results.values() if isinstance(results, dict) else results:
        result.fill_(torch.nan)
    graph.replay()
    return results
