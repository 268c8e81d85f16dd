"""Wrong calls of attention_with_cache, and what each one says: the argument first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention.errors import PageError
from cute_attention.inference import attention_with_cache, explain_with_cache

BATCH, ROOM, HEADS, HEADS_KV, DIM = 2, 32, 4, 2, 16


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def right(**changes: Any) -> dict[str, Any]:
    """The arguments of a call in which only `changes` are wrong."""
    return {
        "q": torch.ones(BATCH, 1, HEADS, DIM), "k_cache": torch.ones(BATCH, ROOM, HEADS_KV, DIM),
        "v_cache": torch.ones(BATCH, ROOM, HEADS_KV, DIM), "cache_seqlens": ints(3, 30), **changes,
    }  # fmt: skip


NEW = torch.ones(BATCH, 3, HEADS_KV, DIM)
TABLE = ints(0, 1, 2, 3).view(2, 2)
PAGES = {"k_cache": torch.ones(4, 16, HEADS_KV, DIM), "v_cache": torch.ones(4, 16, HEADS_KV, DIM)}
ANGLES = torch.ones(40, DIM // 2)
PACKED = {"q": torch.ones(5, HEADS, DIM), "cu_seqlens_q": ints(0, 3, 5)}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1]}, TypeError, "q is a list, expected a torch.Tensor"),
    ({"q": torch.ones(2, 4, 16)}, ValueError, "q has shape [2, 4, 16], expected 4 dimensions"),
    ({"q": torch.ones(2, 1, 4, 16).int()}, TypeError, "q has dtype torch.int32, expected float16"),
    ({"k_cache": torch.ones(2, 32, 2, 8)}, ValueError, "k_cache has shape [2, 32, 2, 8]"),
    ({"k_cache": torch.ones(2, 32, 2, 16).half()}, TypeError, "k_cache has dtype torch.float16"),
    ({"v_cache": torch.ones(2, 31, 2, 16)}, ValueError, "v_cache has shape [2, 31, 2, 16]"),
    ({"v_cache": torch.ones(2, 32, 2, 0)}, ValueError, "v_cache has shape [2, 32, 2, 0]"),
    ({"q": torch.ones(2, 1, 3, 16)}, ValueError, "q has 3 heads and k_cache has 2"),
    ({"q": torch.ones(3, 1, 4, 16), "cache_seqlens": 1}, ValueError,
     "k_cache has shape [2, 32, 2, 16], expected at least 3 rows"),
    ({"cache_seqlens": ints(1, 2, 3)}, ValueError, "cache_seqlens has shape [3], expected [2]"),
    ({"cache_seqlens": ints(1, 2).long()}, TypeError,
     "cache_seqlens has dtype torch.int64, expected torch.int32 (pass cache_seqlens.int())"),
    ({"cache_seqlens": 1.5}, TypeError, "cache_seqlens is a float, expected an int32"),
    ({"cache_seqlens": True}, TypeError, "cache_seqlens is a bool"),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens is -1, expected an int >= 0"),
    ({"cache_seqlens": None, "k": NEW, "v": NEW}, ValueError, "cache_seqlens is None"),
    ({"k": NEW}, TypeError, "v is None, expected a torch.Tensor (k and v come together)"),
    ({"v": NEW}, TypeError, "k is None, expected a torch.Tensor"),
    ({"k": NEW.half(), "v": NEW}, TypeError, "k has dtype torch.float16, expected torch.float32"),
    ({"k": NEW, "v": NEW[:, :2]}, ValueError, "v has shape [2, 2, 2, 16], expected [2, 3, 2, 16]"),
    ({"k": NEW[0], "v": NEW[0]}, ValueError, "k has shape [3, 2, 16]"),
    ({"cu_seqlens_k_new": ints(0, 1, 2)}, ValueError, "cu_seqlens_k_new is given, expected k"),
    ({"block_table": TABLE.long()}, TypeError, "block_table has dtype torch.int64"),
    ({"block_table": TABLE[0]}, ValueError, "block_table has shape [2], expected [batch, pages"),
    ({"block_table": TABLE[:1]}, ValueError, "block_table has shape [1, 2], expected at least 2"),
    ({"cache_batch_idx": ints(0)}, ValueError, "cache_batch_idx has shape [1], expected [2]"),
    ({"leftpad": [0, 0]}, TypeError, "leftpad is a list"),
    ({**PACKED, "cu_seqlens_q": [0, 5]}, TypeError, "cu_seqlens_q is a list"),
    ({"rotary_cos": ANGLES}, TypeError, "rotary_sin is None"),
    ({"rotary_cos": ANGLES, "rotary_sin": ANGLES}, ValueError, "rotary_cos is given, expected k"),
    ({"rotary_seqlens": ints(0, 0)}, ValueError, "rotary_seqlens is given, expected rotary_cos"),
    ({"rotary_cos": ANGLES.int(), "rotary_sin": ANGLES, "k": NEW, "v": NEW}, TypeError,
     "rotary_cos has dtype torch.int32"),
    ({"rotary_cos": ANGLES[:, :3], "rotary_sin": ANGLES, "k": NEW, "v": NEW}, ValueError,
     "rotary_cos and rotary_sin have shapes [40, 3] and [40, 8]"),
    ({"causal": 1}, TypeError, "causal is an int, expected a bool"),
    ({"window": 3}, TypeError, "window is an int, expected (left, right) or None"),
    ({"window": (-1, 0)}, ValueError, "window's left side is -1"),
    ({"scale": "a"}, TypeError, "scale is a str, expected a float or None"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
    ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes has shape [3]"),
    ({"sink": torch.ones(4).half()}, TypeError, "sink has dtype torch.float16"),
    ({"qv": torch.ones(2, 1, 4, 8)}, ValueError, "qv has shape [2, 1, 4, 8], expected [2, 1, 4"),
    ({"attention_chunk": -1}, ValueError, "attention_chunk is -1, expected an int >= 0"),
    ({"num_splits": 1.0}, TypeError, "num_splits is a float, expected an int"),
    ({"max_seqlen_k": "a"}, TypeError, "max_seqlen_k is a str, expected an int"),
    ({"batch_invariant": None}, TypeError, "batch_invariant is None, expected a bool"),
    ({"return_lse": 1}, TypeError, "return_lse is an int, expected a bool"),
    ({"backend": "sm70"}, ValueError, "backend is 'sm70', expected one of"),
    ({"window_size": (1, 1)}, TypeError, "there is no option window_size, pass window, where None"),
    ({"page_table": TABLE}, TypeError, "there is no option page_table, pass block_table"),
    ({"colour": 1}, TypeError, "there is no option colour, see help"),
]  # fmt: skip
VALUES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cache_seqlens": ints(3, -2)}, ValueError, "cache_seqlens is [3, -2], expected no negative"),
    ({"cache_seqlens": ints(3, 33)}, ValueError, "cache_seqlens and the new tokens make 33"),
    ({"k": NEW, "v": NEW}, ValueError, "cache_seqlens and the new tokens make 33, expected at most "
     "32 (the tokens that k_cache has room for)"),
    ({**PAGES, "block_table": TABLE, "k": NEW, "v": NEW}, PageError,
     "block_table has shape [2, 2], expected [batch, at least 3]: a sequence has 33 tokens"),
    ({**PAGES, "block_table": TABLE + 1}, PageError, "block_table holds 4, expected pages from 0"),
    ({**PAGES, "block_table": TABLE - 1}, PageError, "block_table holds -1"),
    ({"cache_batch_idx": ints(0, 2)}, ValueError,
     "cache_batch_idx is [0, 2], expected rows of k_cache from 0 to 1"),
    ({"leftpad": ints(0, -1)}, ValueError, "leftpad is [0, -1], expected no negative number"),
    ({"max_seqlen_k": 29}, ValueError, "max_seqlen_k is 29, expected at least 30"),
    ({**PACKED, "max_seqlen_q": 2}, ValueError, "max_seqlen_q is 2, expected at least 3"),
    ({**PACKED, "cu_seqlens_q": ints(0, 3, 6)}, ValueError, "cu_seqlens_q is [0, 3, 6], expected"),
    ({**PACKED, "cu_seqlens_q": ints(1, 3, 5)}, ValueError, "cu_seqlens_q is [1, 3, 5], expected"),
    ({"k": NEW[:, :1], "v": NEW[:, :1], "rotary_cos": ANGLES[:30], "rotary_sin": ANGLES[:30]},
     ValueError, "rotary_cos has 30 positions, expected at least 31"),
]  # fmt: skip


def ids(rows: list[tuple[dict[str, Any], type[Exception], str]]) -> list[str]:
    return [row[2][:40] for row in rows]


def assert_says(error: type[Exception], words: str, name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(f"{name}: {words}")


def test_the_call_is_right_without_changes() -> None:
    assert attention_with_cache(**right()).shape == (BATCH, 1, HEADS, DIM)
    assert attention_with_cache(**right(**PACKED)).shape == (5, HEADS, DIM)


@pytest.mark.parametrize(("changes", "error", "words"), WRONG, ids=ids(WRONG))
def test_what_is_seen_without_values(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    given = right(**changes)
    assert_says(error, words, "attention_with_cache", lambda: attention_with_cache(**given))
    name = "explain_with_cache" if "no option" in words else "attention_with_cache"
    assert_says(error, words, name, lambda: explain_with_cache(**given))


@pytest.mark.parametrize(("changes", "error", "words"), VALUES, ids=ids(VALUES))
def test_what_the_reference_reads(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    """It raises before anything is written."""
    given = right(**changes)
    given["k_cache"], given["v_cache"] = given["k_cache"].clone(), given["v_cache"].clone()
    saved = given["k_cache"].clone()
    given |= {name: given[name] * 2 for name in ("k", "v") if name in given}
    assert_says(error, words, "attention_with_cache", lambda: attention_with_cache(**given))
    assert torch.equal(given["k_cache"], saved)


GRADIENTS = {
    "q": {}, "k_cache": {}, "v_cache": {}, "k": {"v": NEW, "cache_seqlens": ints(3, 9)},
    "v": {"k": NEW, "cache_seqlens": ints(3, 9)},
    "qv": {"qv": torch.ones(BATCH, 1, HEADS, DIM)},
}  # fmt: skip


@pytest.mark.parametrize("label", GRADIENTS)
def test_no_tensor_waits_for_a_gradient_in_vain(label: str) -> None:
    given = right(**{label: NEW, **GRADIENTS[label]} if label in "kv" else GRADIENTS[label])
    given[label] = given[label].clone().requires_grad_()
    words = f"{label} requires a gradient, expected none, since a cache has none"
    assert_says(ValueError, words, "attention_with_cache", lambda: attention_with_cache(**given))
    with torch.no_grad():
        attention_with_cache(**given)


def test_a_device_is_named() -> None:
    """Each tensor is on q's device."""
    names = ("k_cache", "v_cache", "cache_seqlens", "block_table", "leftpad", "sink")
    for name in names:
        given = right(**PAGES, block_table=TABLE, leftpad=ints(0, 0), sink=torch.ones(HEADS))
        given[name] = given[name].to("meta")
        words = f"{name} is on meta, expected cpu (the device of q)"
        assert_says(
            ValueError, words, "attention_with_cache", lambda g=given: attention_with_cache(**g)
        )
