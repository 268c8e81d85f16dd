"""The masks of transformers: what they mean for our kernels.

transformers describes a mask by a function of (batch, head, query, key), composed of a few that it
defines, and asks a backend to make of it what the backend wants. Ours recognises the compositions
that are a causal mask, a window or both, with padding or with several sequences in a row, and makes
a mask of `[batch, keys]`, which says which keys are tokens, or to which sequence they belong. What
it does not recognise becomes the whole mask of `[batch, 1, queries, keys]`, as for PyTorch's own
attention, and a warning names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import FallbackWarning

IDS = torch.int32  # the dtype of a mask that numbers sequences; tokenizers make padding of int64
_NOTE = "cute_attention_note"  # the attribute of a mask that we have made


class Pattern(NamedTuple):
    """What a query sees of its sequence, in our words; None is unbounded."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    ids: Tensor | None = None  # [batch, seqlen]: to which sequence of its row a token belongs

    def both(self, other: Pattern) -> Pattern:
        """What both let a query see."""
        return Pattern(
            self.causal or other.causal,
            _least(self.left, other.left),
            _least(self.right, other.right),
            other.ids if self.ids is None else self.ids,
        )


def _least(one: int | None, other: int | None) -> int | None:
    return min((side for side in (one, other) if side is not None), default=None)


class Note(NamedTuple):
    """What we know of a mask that we have made, for the attention that is called with it."""

    pattern: Pattern
    whole: bool  # there is no padding among the keys that the mask is about


def note_of(mask: Tensor | None) -> Note | None:
    """What was noted of a mask; None where it is not of our making, or was copied since."""
    return getattr(mask, _NOTE, None)


def _noted(mask: Tensor, pattern: Pattern, whole: bool) -> Tensor:
    if not torch.compiler.is_compiling():  # which knows no attributes of tensors
        setattr(mask, _NOTE, Note(pattern._replace(ids=None), whole))
    return mask


class _Unknown(Exception):
    """A part of a mask that our kernels do not know."""


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function has kept of the function that made it."""
    closure = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, closure, strict=True)
    }


def recognised(function: Callable[..., Any]) -> Pattern:
    """What a mask function of transformers means.

    Raises:
        _Unknown: it is none of those that our kernels serve.
    """
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Pattern()
    code = getattr(function, "__code__", None)
    # Of each function that makes functions: what it is called with here matters to nobody.
    makers: dict[str, tuple[Any, ...]] = {
        "and_masks": (),
        "sliding_window_overlay": (0,),
        "sliding_window_bidirectional_overlay": (0,),
        "packed_sequence_mask_function": (None,),
        "remap_positions_for_packed_sequence": (None, None),
    }
    for name, arguments in makers.items():
        maker = getattr(masking_utils, name, None)  # transformers 4.57 lacks two of them
        if maker is not None and maker(*arguments).__code__ is code:
            return _of_made(name, _cells(function))
    raise _Unknown(getattr(function, "__qualname__", repr(function)))


def _of_made(name: str, cells: dict[str, Any]) -> Pattern:
    if name == "and_masks":
        pattern = Pattern()
        for part in cells["mask_functions"]:
            pattern = pattern.both(recognised(part))
        return pattern
    if name == "sliding_window_overlay":
        return Pattern(left=cells["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":
        return Pattern(left=cells["sliding_window"], right=cells["sliding_window"])
    if name == "packed_sequence_mask_function":
        return Pattern(ids=cells["packed_sequence_mask"])
    # Positions that begin anew in each sequence: inside of one, distances are the same.
    return recognised(cells["mask_function"])


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """What transformers calls for the mask of a model with our attention.

    Args:
        batch_size: how many rows.
        q_length: how many queries a row has; from transformers 5 on.
        kv_length: how many keys, with those of a static cache that nothing was written to.
        q_offset: the position of the first query, an int or a tensor; from transformers 5 on.
        kv_offset: the position of the first key.
        mask_function: what a query sees.
        attention_mask: bool `[batch, tokens seen so far]`: False for padding.
        cache_position: the positions of the queries; in transformers 4.
        **others: what the masks of other backends are made of, too.

    Returns:
        None where queries see what `is_causal` of their module says; `[batch, keys]` where some
        keys are padding, or more than were written, or where there is a window;
        `[batch, 1, queries, keys]` where no kernel serves the mask.
    """
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    assert q_length is not None
    if torch.compiler.is_compiling():
        traced = _in_a_graph(q_length, kv_length, q_offset, kv_offset, mask_function)
        if traced is not None:
            return _visible(traced, attention_mask, kv_length, kv_offset)
    return _made(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        cache_position,
        others,
    )


def _in_a_graph(
    q_length: int, kv_length: int, q_offset: Any, kv_offset: int, function: Any
) -> Tensor | bool | None:
    """Which keys a graph that is traced may see, or True for all; None where that cannot be said
    without leaving the graph, since Dynamo does not look into a function that a function made."""
    from transformers import masking_utils

    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return True
    if function is not masking_utils.causal_mask_function:
        return None
    if isinstance(q_offset, int):
        return True if q_offset + q_length - kv_offset == kv_length else None
    if q_length != 1:
        return None
    keys = torch.arange(kv_length, device=q_offset.device) + kv_offset
    return (keys <= q_offset)[None]


def _visible(
    seen: Tensor | bool, attention_mask: Tensor | None, kv_length: int, kv_offset: int
) -> Tensor | None:
    if attention_mask is None:
        return None if seen is True else seen  # type: ignore[return-value]
    return _of_keys(attention_mask, kv_length, kv_offset) & seen


def _of_keys(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """The part of a mask of all tokens so far that is about the keys of a layer."""
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def _has_gaps(attention_mask: Tensor | None) -> bool:
    """Whether there is padding between tokens: a window counts it, and rows without padding lack
    it."""
    if attention_mask is None:
        return False
    is_token = attention_mask.bool()
    begins = is_token.clone()
    begins[:, 1:] &= ~is_token[:, :-1]
    return bool((begins.sum(1) > 1).any())


@torch.compiler.disable
def _made(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int,
    mask_function: Any,
    attention_mask: Tensor | None,
    cache_position: Tensor | None,
    others: dict[str, Any],
) -> Tensor | None:
    try:
        pattern = recognised(mask_function)
        bounds = [side for side in (pattern.left, pattern.right) if side is not None]
        if any(side < kv_length - 1 for side in bounds) and _has_gaps(attention_mask):
            raise _Unknown("of a window over padding between tokens")
    except _Unknown as unknown:
        _warn_of(str(unknown), others.get("config"))
        sizes: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset}
        if cache_position is not None:
            sizes = {"cache_position": cache_position}
        return _whole_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **sizes,
            **others,
        )
    if pattern.ids is not None:
        return _noted(pattern.ids.to(IDS), pattern, whole=False)
    if pattern.causal:  # keys after the last query were not written yet
        kv_length = min(kv_length_all := kv_length, int(q_offset) + q_length - kv_offset)
        all_written = kv_length == kv_length_all
    else:
        all_written = True
    if attention_mask is not None:
        attention_mask = _of_keys(attention_mask, kv_length, kv_offset)
        if not attention_mask.all():
            return _noted(attention_mask.bool().clone(), pattern, whole=False)
    if all_written and all(side >= kv_length - 1 for side in bounds):
        return None
    device = others.get("device", "cpu")
    for tensor in (attention_mask, cache_position, q_offset):
        if isinstance(tensor, Tensor):
            device = tensor.device
    keys = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return _noted(keys, pattern, whole=True)


def _whole_mask(**arguments: Any) -> Tensor:
    from transformers import AttentionMaskInterface

    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return AttentionMaskInterface()["sdpa"](**(arguments | skips))


_warned: set[str] = set()


def _warn_of(name: str, config: Any) -> None:
    if name in _warned:
        return
    _warned.add(name)
    model = getattr(config, "model_type", "this model")
    warnings.warn(
        f"cute_attention: no kernel serves the mask {name} of {model}, so it becomes a tensor of "
        "[batch, 1, queries, keys], which is added to the scores",
        FallbackWarning,
        stacklevel=5,  # whoever makes the masks of a model
    )
