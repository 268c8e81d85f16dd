"""Models of transformers with our attention: `attn_implementation="cute_attention"`.

    import cute_attention.integrations.transformers as integration
    integration.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cute_attention")

`register` adds an attention and a mask (masks.py) to the two registries of transformers. Nothing of
transformers is changed.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..checks import type_name
from . import masks
from .masks import Note, Pattern
from .rows import Sequences, every_row, rows_of, sequences_by_position, sequences_of

NAME = "cute_attention"
OLDEST = (4, 57)
_SEQUENCES = "cute_attention_sequences"  # the attribute of positions and masks that were read

# What changes the result of an attention and is none of ours.
_NOT_SERVED = ("head_mask", "indices", "block_indices", "cache")


def register(name: str = NAME) -> None:
    """Makes `attn_implementation=name` known to transformers, from 4.57 on.

    Args:
        name: another name, where "cute_attention" will not do.

    Raises:
        ImportError: transformers is not installed, or older.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "cute_attention.integrations.transformers needs transformers 4.57 or newer "
            "(pip install 'cute-attention[transformers]')"
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(
            "cute_attention.integrations.transformers needs transformers 4.57 or newer, and this "
            f"is {transformers.__version__}"
        )
    transformers.AttentionInterface.register(name, attention_forward)
    transformers.AttentionMaskInterface.register(name, masks.mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for the attention of a layer.

    Args:
        module: the layer; its `is_causal` holds where `is_causal` is None.
        query: `[batch, heads, queries, head_dim]`.
        key: `[batch, heads_kv, keys, head_dim]`, where `keys` may be more than the mask is about.
        value: `[batch, heads_kv, keys, head_dim_v]`.
        attention_mask: of `masks.mask`, or `[batch, 1, queries, keys]` of anybody's making: bool,
            True where a key is seen, or floating and added to the scores; or `[batch, keys]` of
            anybody's making: 0 for padding, which a window does not count.
        dropout: share of the probabilities to drop, in training alone.
        scaling: multiplies q·k; `head_dim ** -0.5` where None.
        sliding_window: how many keys a query sees, itself included, on each side that it sees.
        softcap: `softcap * tanh(scores / softcap)`.
        s_aux: a sink for each head, `[heads]`, of any floating dtype.
        is_causal: whether queries see keys before them alone, where no mask says so.
        position_bias: added to the scores, `[1 or batch, heads, queries, keys]`.
        **others: of these are read: cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k,
            and position_ids, by which several sequences in a row are told apart.

    Returns:
        The output, `[batch, queries, heads, head_dim_v]`, and None for the probabilities.
    """
    _refuse(others)
    query, key, value = _as_kernels_want(module, query, key, value)
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "dropout_p": dropout if module.training else 0.0,
    }
    if s_aux is not None:
        options["sink"] = s_aux.to(torch.promote_types(torch.float32, query.dtype))
    note = masks.note_of(attention_mask)
    if note is None:
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        pattern = _pattern_of(is_causal, sliding_window)
        note = Note(pattern, whole=attention_mask is None)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    described = others.get("cu_seq_lens_q") is not None
    numbered = attention_mask is not None and attention_mask.dtype == masks.IDS
    if position_bias is not None and (described or numbered):
        raise NotImplementedError(
            f"{NAME}: position_bias is given for several sequences in a row, expected one sequence "
            "in each row"
        )
    if described:
        return _several(q, k, v, note.pattern, _lengths_of(others), options), None
    if attention_mask is not None and attention_mask.dim() not in (2, 4):
        raise ValueError(
            f"{NAME}: attention_mask has shape {list(attention_mask.shape)}, expected "
            "[batch, keys] or [batch, 1, queries, keys]"
        )
    if attention_mask is not None:  # a static cache is longer than what was written to it
        k, v = k[:, : attention_mask.shape[-1]], v[:, : attention_mask.shape[-1]]
    if position_bias is not None or (attention_mask is not None and attention_mask.dim() == 4):
        return _biased(q, k, v, note.pattern, attention_mask, position_bias, options), None
    if attention_mask is not None and numbered:
        return _several(q, k, v, note.pattern, _sequences_of(attention_mask), options), None
    if attention_mask is not None and not note.whole:
        return _padded(q, k, v, note.pattern, attention_mask != 0, options), None
    found = None
    if note.pattern.causal and q.shape[1] == k.shape[1] > 1:  # no padding, nothing seen before
        found = _sequences_by_position(module, others.get("position_ids"), q)
    if found is not None:
        return _several(q, k, v, note.pattern, (found, found), options), None
    return attention(q, k, v, **_seen(note.pattern), **options), None


def _pattern_of(is_causal: bool, sliding_window: int | None) -> Pattern:
    """What the arguments of a layer say, where no mask of ours does."""
    side = None if sliding_window is None else sliding_window - 1
    return Pattern(is_causal, side, None if is_causal else side)


def _seen(pattern: Pattern) -> dict[str, Any]:
    """Our options for a pattern."""
    return {"causal": pattern.causal, "window": (pattern.left, pattern.right)}


def _refuse(others: dict[str, Any]) -> None:
    for name in _NOT_SERVED:
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{NAME}: {name} is {type_name(others[name])}, expected None: there is no such "
                "argument here (use attn_implementation='sdpa' or 'eager')"
            )
    if others.get("output_attentions"):
        _warn_of_probabilities()


def _warn_of_probabilities() -> None:
    warnings.warn(
        f"{NAME} returns no probabilities, so output_attentions has no effect; use "
        "attn_implementation='eager' for them",
        UserWarning,
        stacklevel=4,
    )


def _as_kernels_want(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """In the half precision of the layer's weights, where a norm in float32 has made queries of
    float32 of them, as adapters do. Autocast, where it is on, does it itself."""
    if query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type):
        return query, key, value
    for parameter in module.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            dtype = parameter.dtype
            return query.to(dtype), key.to(dtype), value.to(dtype)
        if parameter.dtype == torch.float32:
            break
    return query, key, value


def _lengths_of(others: dict[str, Any]) -> tuple[Sequences, Sequences]:
    """The sequences that the caller has described."""

    def of(side: str) -> Sequences:
        offsets = others.get(f"cu_seq_lens_{side}")
        if offsets is None:
            raise ValueError(f"{NAME}: cu_seq_lens_{side} is None, expected an int32 tensor")
        longest = others.get(f"max_length_{side}")
        return Sequences(offsets.int(), int(offsets.diff().max() if longest is None else longest))

    return of("q"), of("k")


class _Known(NamedTuple):
    """What positions have told."""

    first: int  # the id of the layer that asked
    version: int | None  # of the tensor
    sequences: Sequences | None


def _sequences_of(ids: Tensor) -> tuple[Sequences, Sequences]:
    """The sequences of a mask that numbers them, found once for all layers."""
    found = getattr(ids, _SEQUENCES, None)
    if found is None:
        found = sequences_of(ids)
        setattr(ids, _SEQUENCES, found)
    return found, found


def _sequences_by_position(module: torch.nn.Module, positions: Any, q: Tensor) -> Sequences | None:
    """Those that positions tell apart, found once for all layers. A traced graph cannot ask, since
    the answer is not known before it runs.

    Tensors of `torch.inference_mode` do not count how often they were changed: the layer that has
    asked first reads them again each time."""
    if not isinstance(positions, Tensor) or torch.compiler.is_compiling():
        return None
    if positions.dim() != 2 or positions.shape[1] != q.shape[1]:
        return None
    known = getattr(positions, _SEQUENCES, None)
    version = None if positions.is_inference() else positions._version
    asks_again = version is None and known is not None and known.first == id(module)
    if known is None or known.version != version or asks_again:
        found = sequences_by_position(positions, q.shape[0])
        known = _Known(id(module), version, found)
        setattr(positions, _SEQUENCES, known)
    return known.sequences


def _several(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    sequences: tuple[Sequences, Sequences],
    options: dict[str, Any],
) -> Tensor:
    """Several sequences, one after the other in the rows of the batch."""
    of_q, of_k = sequences
    out = attention_varlen(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        of_q.offsets.to(q.device),
        of_k.offsets.to(q.device),
        of_q.longest,
        of_k.longest,
        **_seen(pattern),
        **options,
    )
    return out.unflatten(0, q.shape[:2])


def _padded(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, valid: Tensor, options: dict[str, Any]
) -> Tensor:
    """Keys that are padding are left out, and so are queries where it matters which key is at their
    place; the output of those is 0."""
    valid = valid.to(q.device)
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    rows_k = rows_of(valid)
    bounded = pattern.causal or pattern.left is not None or pattern.right is not None
    if bounded and seqlen_q > 1:
        rows_q = rows_of(valid[:, seqlen_k - seqlen_q :])
        packed_q, offsets_q = rows_q.pack(q), rows_q.offsets
    else:
        rows_q = None
        packed_q, offsets_q = q.flatten(0, 1), every_row(batch, seqlen_q, q.device)
    out = attention_varlen(
        packed_q,
        rows_k.pack(k),
        rows_k.pack(v),
        offsets_q,
        rows_k.offsets,
        seqlen_q,
        seqlen_k,
        **_seen(pattern),
        **options,
    )
    if rows_q is None:
        return out.unflatten(0, (batch, seqlen_q))
    return rows_q.unpack(out, batch)


def _biased(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    mask: Tensor | None,
    position_bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """With a mask for each query and key, or a bias, or both, as one bias."""
    bias = position_bias
    if bias is not None:
        bias = bias[..., : k.shape[1]]
    if mask is not None and mask.dim() == 4:
        pattern = Pattern()  # the mask says everything
    elif mask is not None:
        mask = mask[:, None, None, :]
        if mask.dtype != torch.bool:
            mask = mask != 0
    if mask is not None and mask.dtype == torch.bool:
        hidden = q.new_zeros(()) if bias is None else bias
        bias = torch.where(mask.to(q.device), hidden, -torch.inf)
    elif mask is not None:
        bias = mask if bias is None else bias + mask
    assert bias is not None
    if bias.dtype not in (q.dtype, torch.float32):
        bias = bias.to(q.dtype)
    return attention(q, k, v, bias=bias, **_seen(pattern), **options)
