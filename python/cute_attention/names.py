"""What other libraries call our options, to tell their users what they are called here."""

from __future__ import annotations

_CAUSAL = (
    "causal (its mask is aligned to the bottom right, PyTorch's is_causal to the top left: they "
    "differ where seqlen_q != seqlen_k)"
)
_BIAS = (
    "bias, which is added to the scores; of a mask that is True where a key is seen, pass "
    "torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)"
)
_PADDING = "attention_varlen, which takes sequences without their padding"

# Name in another library: what to write instead.
ELSEWHERE = {
    "is_causal": _CAUSAL,
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "scale_factor": "scale",
    "window_size": "window, where None and not -1 is unbounded",
    "sliding_window": "window=(size - 1, 0)",
    "attn_mask": _BIAS,
    "attention_mask": _BIAS,
    "mask": _BIAS,
    "attn_bias": "bias",
    "key_padding_mask": _PADDING,
    "dropout": "dropout_p",
    "p_dropout": "dropout_p",
    "logits_soft_cap": "softcap",
    "sinks": "sink",
    "s_aux": "sink",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse, which returns the LSE and no probabilities",
    "enable_gqa": "nothing: heads_kv may divide heads in any call",
    "cu_seqlens": "cu_seqlens_q and cu_seqlens_k of attention_varlen",
    "cu_seqlens_q": "attention_varlen, which takes packed sequences",
    "cu_seqlens_k": "attention_varlen, which takes packed sequences",
    "max_seqlen_q": "attention_varlen, which takes packed sequences",
    "max_seqlen_k": "attention_varlen, which takes packed sequences",
}


def unknown_option(function: str, name: str) -> TypeError:
    """The error for a keyword that a function does not take."""
    if name in ELSEWHERE:
        return TypeError(f"{function}: there is no option {name}, pass {ELSEWHERE[name]}")
    return TypeError(f"{function}: there is no option {name}, see help(cute_attention.{function})")
