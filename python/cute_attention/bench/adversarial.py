"""Inputs made to break an online softmax: scores that a kernel's running maximum does not expect.

Each is an entry of ADVERSARIAL: a change to standard normal q and k that puts the scores where its
description says. The softmax does not depend on v and on the gradient of the output, so the caller
chooses them. Kernels walk over the keys in tiles, most of them from the last key to the first.
Below, "first" and "last" mean this order of the walk, and "left" means towards key 0.

An entry puts a wanted score into two channels, which hold a constant in q and the score in k. The
score needs two channels because bf16 keeps only 8 bits of it in the first; the second holds 8 bits
of the rest. All other channels stay random: unless an entry says otherwise, they add scores with a
standard deviation of about 1 to the wanted ones. Under a causal mask as well, every query has a
finite score at some key that it sees, so that the exact output and LSE are finite. The gradient of
q is not finite where a key holds -infinity, since 0 times infinity is no number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
SINK = 90.0  # exp(90) overflows fp32, and all other keys together weigh nothing beside this one
SPAN = 192  # so many neighbouring keys hold a whole tile of every kernel, wherever tiles begin
TILES = (64, 128)
STEPS = (20, 80, 300)
GAINS = (1, 3, 10, 30, 100, 300)


class Draft:
    """q and k while an entry changes them: float32, rounded to the dtype at the end.

    q is [..., seqlen_q, heads, head_dim] and k [..., seqlen_k, heads_kv, head_dim].
    """

    def __init__(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> None:
        self.q, self.k, self.dtype = q.float().clone(), k.float().clone(), dtype
        self.seqlen_q, self.seqlen_k = q.shape[-3], k.shape[-3]

    @property
    def key(self) -> Tensor:
        """0, 1, 2, ... for every key."""
        return torch.arange(self.seqlen_k, device=self.k.device)

    def add_scores(self, wanted: Tensor, rows: Tensor | None = None) -> None:
        """Adds wanted [seqlen_k] to the scaled scores of all queries, or of those in `rows` (bool
        [seqlen_q]), as exactly as two numbers of the dtype can say it."""
        root = self.q.shape[-1] ** 0.5  # undoes the scale
        gain = 2.0 ** math.ceil(math.log2(root))  # a power of two: exact in every dtype
        limit = torch.finfo(self.dtype).max
        scaled = (wanted.double() * (root / gain)).clamp(-limit, limit)
        high = scaled.to(self.dtype).double()
        self.k[..., 0] = high[:, None].float()
        self.k[..., 1] = (scaled - high)[:, None].float()
        self.q[..., :2] = gain
        if rows is not None:
            self.q[..., ~rows, :, :2] = 0.0

    def put_channel(self, keys: Tensor, value: float) -> None:
        """Puts `value` into channel 0 of `keys` (bool [seqlen_k]), where every query has a 1."""
        self.q[..., 0] = 1.0
        self.k[..., 0] = torch.where(keys, value, 0.0)[:, None]

    def rounded(self) -> tuple[Tensor, Tensor]:
        return self.q.to(self.dtype), self.k.to(self.dtype)


@dataclass(frozen=True)
class Adversarial:
    """One kind of input: `change` turns a draft of standard normal values into it."""

    name: str
    description: str
    change: Callable[[Draft], None]
    dtypes: tuple[torch.dtype, ...] = HALVES

    @property
    def group(self) -> str:
        return self.name.partition("_")[0]

    def make(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """q and k of this kind, rounded to the dtype, from standard normal ones."""
        draft = Draft(q, k, dtype)
        self.change(draft)
        return draft.rounded()


ADVERSARIAL: dict[str, Adversarial] = {}


def _add(
    name: str,
    description: str,
    change: Callable[[Draft], None],
    dtypes: tuple[torch.dtype, ...] = HALVES,
) -> None:
    ADVERSARIAL[name] = Adversarial(name, description, change, dtypes)


def select(words: Iterable[str], dtype: torch.dtype) -> list[Adversarial]:
    """The entries that are named, or whose group is, and that the dtype can hold."""
    chosen = set(words)
    return [
        entry
        for entry in ADVERSARIAL.values()
        if chosen & {entry.name, entry.group, "all"}
        and (dtype in entry.dtypes or dtype not in HALVES)
    ]


def groups() -> list[str]:
    return list(dict.fromkeys(entry.group for entry in ADVERSARIAL.values()))


# --- random, and one key above all others --------------------------------------------------------


def _gain(draft: Draft, factor: float) -> None:
    draft.q *= factor


def _sink(draft: Draft, place: float) -> None:
    wanted = torch.zeros(draft.seqlen_k, device=draft.k.device)
    wanted[round(place * (draft.seqlen_k - 1))] = SINK
    draft.add_scores(wanted)


for _factor in GAINS:
    _add(
        f"random_x{_factor}",
        f"standard normal, q times {_factor}: scores of standard deviation {_factor}",
        functools.partial(_gain, factor=_factor),
    )
for _name, _place in (("left", 0.0), ("middle", 0.5), ("right", 1.0)):
    _add(
        f"sink_{_name}",
        f"one key whose score stands {SINK:g} above the rest, at the {_name}: an attention sink",
        functools.partial(_sink, place=_place),
    )


# --- scores that grow ----------------------------------------------------------------------------


def _slope(draft: Draft, to_left: bool) -> None:
    distance = draft.seqlen_k - 1 - draft.key if to_left else draft.key
    draft.add_scores(2.0 * distance)


def _steps(draft: Draft, tile: int, step: float, direction: str) -> None:
    index = draft.key // tile
    walked = index.max() - index  # how many groups of keys a walk from the right has passed before
    level = {
        "left": walked,
        "right": index,
        "alternating": torch.where(walked % 2 == 0, walked, -walked),
    }[direction]
    draft.add_scores(step * level)


_add("slope_left", "scores that grow by 2 a key to the left", lambda d: _slope(d, True))
_add("slope_right", "scores that grow by 2 a key to the right", lambda d: _slope(d, False))
_WAYS = {
    "left": "to the left",
    "right": "to the right",
    "alternating": "to the left, up in one tile and down by as much in the next",
}
for _tile in TILES:
    for _step in STEPS:
        for _way, _text in _WAYS.items():
            _add(
                f"steps_{_step}_per_{_tile}_{_way}",
                f"scores that grow by {_step} every {_tile} keys {_text}",
                functools.partial(_steps, tile=_tile, step=_step, direction=_way),
            )


# --- keys hidden, or raised, through a channel ---------------------------------------------------


def _places(draft: Draft) -> dict[str, Tensor]:
    """Sets of keys by name, each bool [seqlen_k]; shorter ones where there are few keys."""
    key, count = draft.key, draft.seqlen_k
    span, tile = max(1, min(SPAN, count // 3)), max(1, min(128, count // 4))
    # A key that every query sees: the first query of a causal mask sees the first `common` keys.
    common = max(1, count - draft.seqlen_q + 1)
    return {
        "first": key >= count - span,
        "middle": (key - count // 2).abs() <= span,
        "last": key < span,
        "all_but_one": key != common // 2,
        "alternating": (key // tile) % 2 == 1,
    }


def _hide(draft: Draft, place: str, value: float) -> None:
    hidden = _places(draft)[place]
    common = max(1, draft.seqlen_k - draft.seqlen_q + 1)
    if hidden[:common].all():  # the first causal query must have a key
        hidden[0] = False
    draft.put_channel(hidden, value)


def _hide_by_lowest(draft: Draft, place: str) -> None:
    _hide(draft, place, torch.finfo(draft.dtype).min)


def _raise(draft: Draft, place: str) -> None:
    draft.put_channel(_places(draft)[place], 1e4)


_PLACES = {
    "first": f"the last {SPAN} keys, which kernels visit first",
    "middle": f"the {2 * SPAN} keys in the middle",
    "last": f"the first {SPAN} keys, which kernels visit last",
    "all_but_one": "all keys but one",
    "alternating": "every other tile of 128 keys",
}
for _place_name, _which in _PLACES.items():
    _add(
        f"hidden_1e4_{_place_name}",
        f"{_which} hidden by -1e4 in a channel",
        functools.partial(_hide, place=_place_name, value=-1e4),
    )
    _add(
        f"hidden_1e30_{_place_name}",
        f"{_which} hidden by -1e30 in a channel",
        functools.partial(_hide, place=_place_name, value=-1e30),
        (torch.bfloat16,),
    )
    _add(
        f"hidden_lowest_{_place_name}",
        f"{_which} hidden by the lowest number of the dtype in a channel",
        functools.partial(_hide_by_lowest, place=_place_name),
    )
    _add(
        f"hidden_inf_{_place_name}",
        f"{_which} hidden by -infinity in a channel",
        functools.partial(_hide, place=_place_name, value=-math.inf),
    )
    _add(
        f"raised_1e4_{_place_name}",
        f"{_which} raised by +1e4 in a channel",
        functools.partial(_raise, place=_place_name),
    )


# --- equal scores, and rows that drag their neighbours -------------------------------------------


def _equal(draft: Draft, score: float) -> None:
    draft.q.zero_()
    draft.add_scores(torch.full((draft.seqlen_k,), score, device=draft.k.device))


def _one_row_in_64(draft: Draft) -> Tensor:
    return torch.arange(draft.seqlen_q, device=draft.q.device) % 64 == 0


def _mix_gain(draft: Draft) -> None:
    draft.q[..., _one_row_in_64(draft), :, :] *= 100.0


def _mix_slope(draft: Draft) -> None:
    draft.add_scores(2.0 * (draft.seqlen_k - 1 - draft.key), _one_row_in_64(draft))


_add("equal_high", "all scores equal and very large: 1e4", lambda d: _equal(d, 1e4))
_add("equal_low", "all scores equal and very low: -1e4", lambda d: _equal(d, -1e4))
_add("mix_x100", "one query row in 64 times 100, the others standard normal", _mix_gain)
_add(
    "mix_slope",
    "scores of one query row in 64 grow by 2 a key to the left, the others are random",
    _mix_slope,
)
