"""The named sets of points that `--set` takes."""

from __future__ import annotations

from collections.abc import Iterable

from .points import Bounds, Grid, Point, packed_point

POWERS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = ("full", "causal")


# Attention in models as they are trained and served. Under a causal mask with fewer queries than
# keys the queries are the last positions.
_MODELS = (
    # label, batch, queries, keys, heads, KV heads, head dim, head dim of v, mask
    ("ViT-B/16 224", 64, 197, 197, 12, 12, 64, 64, "full"),
    ("ViT-L/14 336", 32, 577, 577, 16, 16, 64, 64, "full"),
    ("ViT-H/14", 32, 257, 257, 16, 16, 80, 80, "full"),
    ("BERT 512", 64, 512, 512, 16, 16, 64, 64, "full"),
    ("BERT 128", 256, 128, 128, 16, 16, 64, 64, "full"),
    ("Swin window 49", 4096, 49, 49, 4, 4, 32, 32, "full"),
    ("SD1.5 self 64x64", 4, 4096, 4096, 8, 8, 40, 40, "full"),
    ("SD1.5 cross", 4, 4096, 77, 8, 8, 40, 40, "full"),
    ("SDXL self 32x32", 4, 1024, 1024, 20, 20, 64, 64, "full"),
    ("SDXL cross", 4, 1024, 77, 20, 20, 64, 64, "full"),
    ("SD3 / Flux joint", 2, 4608, 4608, 24, 24, 128, 128, "full"),
    ("video DiT 32k", 1, 32760, 32760, 12, 12, 128, 128, "full"),
    ("Whisper encoder", 8, 1500, 1500, 20, 20, 64, 64, "full"),
    ("Llama 8B 2k", 4, 2048, 2048, 32, 8, 128, 128, "causal"),
    ("Llama 8B 32k", 1, 32768, 32768, 32, 8, 128, 128, "causal"),
    ("Qwen 0.6B 4k", 8, 4096, 4096, 16, 8, 128, 128, "causal"),
    ("Gemma 2B 8k", 2, 8192, 8192, 8, 1, 256, 256, "causal"),
    ("Phi-3 mini 4k", 4, 4096, 4096, 32, 32, 96, 96, "causal"),
    ("GPT-2 1k", 16, 1024, 1024, 12, 12, 64, 64, "causal"),
    ("GPT-2 XL 1k", 8, 1024, 1024, 25, 25, 64, 64, "causal"),
    ("Falcon 7B MQA", 4, 2048, 2048, 71, 1, 64, 64, "causal"),
    ("DeepSeek 192/128 4k", 2, 4096, 4096, 32, 32, 192, 128, "causal"),
    ("gpt-oss 64 heads d64", 2, 8192, 8192, 64, 8, 64, 64, "causal"),
    ("prefill chunk 512 over 32k", 1, 512, 32768, 32, 8, 128, 128, "causal"),
    ("speculative 8 over 8k", 16, 8, 8192, 32, 8, 128, 128, "causal"),
    ("Perceiver 512 over 50k", 2, 512, 50176, 8, 8, 128, 128, "full"),
    ("one head, 16k", 1, 16384, 16384, 1, 1, 128, 128, "causal"),
    ("two heads 64k", 1, 65536, 65536, 2, 2, 128, 128, "causal"),
    ("batch 1, 512", 1, 512, 512, 16, 16, 64, 64, "causal"),
    ("batch 1, 2k", 1, 2048, 2048, 16, 16, 128, 128, "causal"),
)


def _models() -> list[Point]:
    return [
        Point(
            batch,
            heads,
            seqlen_q,
            head_dim,
            heads_kv,
            seqlen_k,
            head_dim_v,
            causal=mask == "causal",
            label=label,
        )
        for label, batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v, mask in _MODELS
    ]


def _gqa() -> list[Point]:
    """Causal attention with the heads, KV heads and head dims that released models have."""
    shapes = [
        ("Llama 3 8B", 1, 8192, 32, 8, 128, 128),
        ("Llama 3 70B", 1, 8192, 64, 8, 128, 128),
        ("Llama 3 70B", 2, 4096, 64, 8, 128, 128),
        ("Qwen3 0.6B", 4, 4096, 16, 8, 128, 128),
        ("Qwen3 30B-A3B", 1, 8192, 32, 4, 128, 128),
        ("Qwen3 235B-A22B", 1, 8192, 64, 4, 128, 128),
        ("DeepSeek-V3", 1, 4096, 128, 128, 192, 128),
        ("DeepSeek-V3", 1, 8192, 128, 128, 192, 128),
        ("MQA", 2, 8192, 16, 1, 128, 128),
    ]
    return [
        Point(batch, heads, seqlen, dim, heads_kv, head_dim_v=dim_v, causal=True, label=label)
        for label, batch, seqlen, heads, heads_kv, dim, dim_v in shapes
    ]


def _windows() -> list[Point]:
    """Windows to the left of each query, of released models and others, and one to both sides. The
    first queries of a sequence see fewer keys than the others: tiles of queries take different
    times, which equal shares of them do not."""
    shapes = [
        ("16k, window 4096", 1, 16384, 16, 16, 128, (4095, 0)),
        ("16k, window 512", 1, 16384, 16, 16, 128, (511, 0)),
        ("4k, window 1024", 4, 4096, 32, 32, 64, (1023, 0)),
        ("Mistral 7B", 1, 8192, 32, 8, 128, (4095, 0)),
        ("Gemma 3 27B", 1, 8192, 32, 16, 128, (1023, 0)),
        ("gpt-oss 120B", 1, 8192, 64, 8, 64, (127, 0)),
        ("both sides, 256", 2, 8192, 16, 16, 128, (256, 256)),
    ]
    return [
        Point(batch, heads, seqlen, dim, heads_kv, window=Bounds(*window), label=label)
        for label, batch, seqlen, heads, heads_kv, dim, window in shapes
    ]


def _varlen(total: int, means: Iterable[int], heads: int, head_dim: int) -> list[Point]:
    return [
        packed_point(
            f"{total}:{mean}:0", heads=heads, head_dim=head_dim, causal=True, label=f"mean {mean}"
        )
        for mean in means
    ]


def named_set(name: str) -> list[Point]:
    """The points of a named set, in bf16."""
    if name == "paper":
        return Grid((64, 128, 256), MASKS, POWERS).points()
    if name == "short":
        seqlens = (128, 256, 512, 1024)
        return [
            point
            for tokens in (4096, 16384)
            for point in Grid((64, 128), MASKS, seqlens, tokens=tokens).points()
        ]
    if name == "gqa":
        return _gqa()
    if name == "models":
        return _models()
    if name == "windows":
        return _windows()
    if name == "varlen":
        return _varlen(32768, (512, 2048, 8192), heads=16, head_dim=128)
    if name == "ladder":
        return Grid((128,), ("causal",), POWERS, batch=1, heads=16).points()
    if name == "cpu":
        return Grid((64,), MASKS, (128, 256, 512), tokens=512, hidden=256).points()
    raise ValueError(f"no set is named {name!r}: the sets are {', '.join(SETS)}")


SETS = {
    "paper": "16k tokens, hidden 2048; dims 64, 128, 256; full, causal; 512 to 16k (36 points)",
    "short": "sequences of 128 to 1024 at 4k and 16k tokens, head dims 64 and 128 (32 points)",
    "gqa": "the attention of Llama 3 8B and 70B, Qwen3, DeepSeek-V3 (192/128), and one MQA shape",
    "models": "30 shapes of models: vision, text, diffusion, speech, cross-attention, prefill, MQA",
    "windows": "windows of 128 to 4096 keys: Mistral 7B, Gemma 3, gpt-oss and others (7 points)",
    "varlen": "32k tokens of packed documents, exponential lengths of mean 512, 2048 and 8192",
    "ladder": "batch 1, 16 heads of 128, causal, 512 to 16k: how cost grows with the sequence",
    "cpu": "tiny: 512 tokens, hidden 256, head dim 64; the default without a GPU",
}
