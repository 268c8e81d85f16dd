"""Small models of transformers with random weights, in float32 on the CPU, and their inputs."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the models here come from nowhere
pytest.importorskip("transformers", reason="needs transformers, which [dev] installs")

import transformers

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
NEW_ENOUGH = pytest.mark.skipif(VERSION < (4, 57), reason="needs transformers 4.57")
SEQLEN = 12
COMMON = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12}
# Configuration, model, options beside those of all, and the oldest transformers whose model asks
# the registry for its attention.
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, (4, 57)),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}, (4, 57)),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA, (4, 57)),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
        (4, 57),
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}, (4, 57)),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (4, 57),
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {"local_attention": 6, "global_attn_every_n_layers": 2, "reference_compile": False},
        (5, 6),
    ),
}
CAUSAL = [name for name in MODELS if name != "modernbert"]
PADDING = {
    "none": None,
    "left": torch.tensor([[1] * 12, [0] * 5 + [1] * 7]),
    "right": torch.tensor([[1] * 12, [1] * 7 + [0] * 5]),
}


def make(name: str, **options):
    config_class, model_class, own, oldest = MODELS[name]
    if oldest > VERSION:
        pytest.skip(f"{name} asks the registry for its attention from transformers {oldest} on")
    config = getattr(transformers, config_class)(**COMMON | own | options)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # initialised or not, and large enough to matter
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    return model.eval()


def tokens(batch: int = 2, seqlen: int = SEQLEN) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, COMMON["vocab_size"], (batch, seqlen), generator=generator)
