"""Every contender, and how a list of names selects among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .base import BASELINE, BUILD, OURS, PEER, Contender
from .doors import ByFlashAttn2, ByFlashAttn3, BySdpa
from .flex import Flex
from .ours import Auto, Reference, Sm80, Sm90
from .packages import FlashAttn2, FlashAttn3, FlashAttn4, Xformers
from .plain import Plain
from .sdpa import Cudnn, Efficient, Flash, Math

__all__ = [
    "BASELINE",
    "BUILD",
    "CONTENDERS",
    "OURS",
    "PEER",
    "Contender",
    "default_names",
    "named",
    "select",
]

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Sm90(),
        Sm80(),
        Auto(),
        Reference(),
        ByFlashAttn2(),
        ByFlashAttn3(),
        BySdpa(),
        FlashAttn4(),
        FlashAttn3(),
        FlashAttn2(),
        Cudnn(),
        Flash(),
        Efficient(),
        Flex(),
        Xformers(),
        Math(),
        Plain(),
    )
}

# Measured only where they are named. "auto" is one of the others, by whatever names it is called.
# FlexAttention compiled for a CPU, and on a GPU the contenders that materialise the scores or run
# block by block in Python, take minutes and never win.
_AUTO = ("auto", "by_fa2", "by_fa3", "by_sdpa")
_LEFT_OUT = {"cuda": (*_AUTO, "reference", "math", "plain"), "cpu": (*_AUTO, "flex")}


def default_names(device: torch.device) -> list[str]:
    """The contenders measured when nobody names any."""
    left_out = _LEFT_OUT.get(device.type, ())
    return [name for name in CONTENDERS if name not in left_out]


def select(names: str | None, device: torch.device) -> list[Contender]:
    """Contenders from "sm90,cudnn", "all", or None for the default of the device."""
    if names is None:
        chosen = default_names(device)
    elif names == "all":
        chosen = list(CONTENDERS)
    else:
        chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    return named(chosen, CONTENDERS, "no contender is named", " or all")


def named(
    names: Sequence[str], known: Mapping[str, Contender], none: str, others: str = ""
) -> list[Contender]:
    """The contenders of these names. The error for one that is not `known` begins with `none`, and
    says which there are."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"{none} {', '.join(map(repr, unknown))}: choose from {', '.join(known)}{others}"
        )
    return [known[name] for name in names]
