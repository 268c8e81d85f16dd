"""How much the results of two kernels may differ that compute the same in other tiles.

Tiles decide in which order the probabilities of a row are added up, and by which maximum they are
scaled before they are rounded. So what both round to 16 bits is not the same number, and each
rounding is off by up to half an ulp. As random numbers these errors have a standard deviation of at
most 1 / sqrt(3) of that, and what is computed from several of them has the square root of the sum
of the squares. What both round in a forward and a backward, S = Q K^T and so on:

    P      of which O is computed, and later dV
    O      which is stored, and of which delta = sum(dO O) is computed
    dS     = P (dP - delta), of which dQ and dK are computed
    results
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_attention.native import rows
from kernel_calls import plain_probabilities
from tolerances import RULES, assert_same_specials

# Errors of six standard deviations are one of a billion of random numbers.
DEVIATIONS = 6.0


def has_either_step(row: rows.TableRow) -> bool:
    """Whether a row with a bias has steps of 128 queries in the backward, but of 64 where this
    stores the gradient of the bias (sm90/steps_of_64.h). Then dq, dk and dv of a call that has it
    stored differ from those of another one by roundings."""
    return row.arch == "sm90" and row.head_dim == 64 and len(row.score_mods) == 1


def variances(
    tensors: list[Tensor], bias: Tensor, rounded: torch.dtype, **options: Any
) -> dict[str, Tensor]:
    """The variances of the errors of the output and the gradients of q, k, v and the bias in one
    kernel, in units of the square of the largest error of a rounding to `rounded`, of the number
    1. Those of a bias in fp32 are not rounded at the end. `tensors` are q, k, v and dO."""
    q, k, v, grad_out = (tensor.double() for tensor in tensors)
    probabilities = plain_probabilities(q, k, {**options, "bias": bias.double()})[0]
    scale = options.get("scale", q.shape[-1] ** -0.5)
    group = q.shape[2] // k.shape[2]
    q, grad_out = q.transpose(1, 2), grad_out.transpose(1, 2)
    k, v = (t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))

    def of_group(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, group)).sum(2)

    out, grad_p = probabilities @ v, grad_out @ v.transpose(-1, -2)
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_s = probabilities * (grad_p - delta)
    of_out = probabilities.square() @ v.square() + out.square()
    of_delta = (probabilities * grad_p).square().sum(-1, keepdim=True)
    of_delta = of_delta + (grad_out * out).square().sum(-1, keepdim=True)
    grad_q, grad_k = scale * grad_s @ k, of_group(scale * grad_s.transpose(-1, -2) @ q)
    grad_v = of_group(probabilities.transpose(-1, -2) @ grad_out)
    of_grad_q = (probabilities @ k).square() * of_delta + grad_s.square() @ k.square()
    of_grad_k = (probabilities.square() * of_delta + grad_s.square()).transpose(-1, -2) @ q.square()
    of_grad_v = probabilities.square().transpose(-1, -2) @ grad_out.square()
    of_grad_bias = (probabilities.square() * of_delta).sum_to_size(bias.shape)
    if bias.dtype == rounded:
        of_grad_bias = of_grad_bias + grad_s.sum_to_size(bias.shape).square()
    found = {
        "out": of_out,
        "dq": scale**2 * of_grad_q + grad_q.square(),
        "dk": scale**2 * of_group(of_grad_k) + grad_k.square(),
        "dv": of_group(of_grad_v) + grad_v.square(),
    }
    return {name: t.transpose(1, 2) / 3 for name, t in found.items()} | {"dbias": of_grad_bias / 3}


def assert_differ_by_roundings(
    found: dict[str, Tensor], expected: dict[str, Tensor], variance: dict[str, Tensor]
) -> None:
    """Asserts that the difference of each number of two kernels is one of errors of these
    variances(), but for what fp32 costs."""
    half_ulp = torch.finfo(found["out"].dtype).eps / 2
    floor = RULES["gradient"].ulps * torch.finfo(torch.float32).eps
    for name, of_one in variance.items():
        assert_same_specials(found[name], expected[name])
        difference = (found[name].double() - expected[name].double()).abs()
        largest = expected[name].double().abs().max()
        allowed = DEVIATIONS * half_ulp * (2 * of_one).sqrt() + floor * largest
        excess = (difference / allowed).nan_to_num().max().item()
        assert excess <= 1, f"{name}: {excess:.3g} times what roundings explain"
