"""Text from a trained model, one byte at a time."""

from __future__ import annotations

import torch

from .model import GPT


@torch.no_grad()
def sample(model: GPT, prompt: bytes, length: int, temperature: float, seed: int) -> str:
    """The prompt and `length` more bytes, as text.

    Keys and values of what was read are kept, so that every byte after the prompt is a call with
    seqlen_q 1: the causal mask is aligned to the bottom right and lets that query see every key.
    """
    model.eval()  # without dropout
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    caches = model.new_caches()
    tokens = list(prompt)
    fresh = tokens[-model.shape.context :]
    for _ in range(length):
        position = len(tokens) - len(fresh)
        logits = model(torch.tensor([fresh], device=device), caches, position)[0, -1]
        probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        fresh = [int(torch.multinomial(probabilities, 1, generator=generator))]
        tokens += fresh
    return printable(bytes(tokens))


def printable(data: bytes) -> str:
    """UTF-8 as far as it is, without what would steer a terminal."""
    text = data.decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
