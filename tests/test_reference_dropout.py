"""Dropout's bits: known Philox vectors, the contract by slow integers, and what they do to
attention."""

from __future__ import annotations

import random

import pytest
import torch

from cute_attention.semantics.dropout import (
    as_seed,
    draw_seed,
    drop_count,
    keep_mask,
    keep_scale,
    philox,
    random_bytes,
)
from cute_attention.semantics.formula import attention_reference
from reference_cases import Case, make_inputs, run_blockwise, run_direct
from tolerances import assert_close

# (counter, key, output): philox4x32 with 7 rounds in Random123's kat_vectors.
KNOWN = [
    ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
    ),
]


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-7 in Python's integers, written from the paper."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def slow_mix(x: int) -> int:
    """The mixer in Python's integers."""
    x ^= x >> 15
    x = x * 0x2C1B3C6D % 2**32
    x ^= x >> 12
    x = x * 0x297A2D39 % 2**32
    return x ^ x >> 15


def slow_byte(seed: int, batch_head: int, i: int, j: int) -> int:
    """The byte of one score, as the contract words it."""

    def row_word(query: int) -> int:
        key = [seed % 2**32, (seed >> 32) % 2**32]
        return slow_philox([query // 4, batch_head, 0, 0], key)[query % 4]

    start = row_word(16 * (i // 16) + i % 8)
    step = row_word(16 * (i // 16) + i % 8 + 8) | 1
    word = slow_mix((start + step * (8 * (j // 16) + j % 8)) % 2**32)
    return word.to_bytes(4, "little")[2 * ((i % 16) // 8) + (j % 16) // 8]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert slow_philox(counter, key) == expected
    tensors = tuple(torch.tensor(word) for word in counter)
    seed = as_seed(key[0] | key[1] << 32, "cpu")
    assert philox(tensors, seed).tolist()[0] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63 - 1, -(2**63), 0x123456789ABCDEF0])
def test_bytes_are_those_of_the_contract(seed: int) -> None:
    pick = random.Random(seed)
    for first_head, i0, j0 in ((0, 0, 0), (7, 5, 3), (3_000_000_000, 2**31 - 40, 2**30 + 17)):
        rows, cols = (i0, i0 + 37), (j0, j0 + 75)
        block = random_bytes(as_seed(seed, "cpu"), (first_head, first_head + 2), rows, cols)
        assert block.shape == (2, 37, 75)
        for _ in range(60):
            head, i, j = pick.randrange(2), pick.randrange(37), pick.randrange(75)
            expected = slow_byte(seed, first_head + head, i0 + i, j0 + j)
            assert block[head, i, j].item() == expected, (head, i, j)


def test_bits_do_not_depend_on_blocks() -> None:
    seed = as_seed(99, "cpu")
    whole = random_bytes(seed, (2, 7), (0, 100), (0, 130))
    pick = random.Random(0)
    for _ in range(50):
        (h0, h1), (i0, i1), (j0, j1) = (
            sorted((pick.randint(low, high), pick.randint(low, high)))
            for low, high in ((2, 7), (0, 100), (0, 130))
        )
        part = random_bytes(seed, (h0, h1), (i0, i1), (j0, j1))
        assert torch.equal(part, whole[h0 - 2 : h1 - 2, i0:i1, j0:j1])


def test_seeds_heads_and_positions_differ() -> None:
    """A counter that ignored one of its inputs would repeat."""
    block = random_bytes(as_seed(5, "cpu"), (0, 3), (0, 64), (0, 64))
    other = random_bytes(as_seed(5 + 2**32, "cpu"), (0, 3), (0, 64), (0, 64))
    for a, b in (
        (block, other),
        (block[0], block[1]),
        (block[:, :16], block[:, 16:32]),
        (block[:, :8], block[:, 8:16]),
        (block[:, 0::2], block[:, 1::2]),
        (block[:, :, :32], block[:, :, 32:]),
        (block[:, :, :16], block[:, :, 16:32]),
        (block[:, :, :8], block[:, :, 8:16]),
        (block[:, :, 0::2], block[:, :, 1::2]),
    ):
        # Two independent bytes are equal once in 256.
        assert (a == b).float().mean().item() < 0.02


def test_bytes_are_uniform() -> None:
    count = torch.bincount(
        random_bytes(as_seed(3, "cpu"), (0, 4), (0, 512), (0, 512)).flatten().int(), minlength=256
    )
    expected = 4 * 512 * 512 / 256
    chi2 = ((count - expected) ** 2 / expected).sum().item()
    assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5  # its mean and standard deviation


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9, 0.99])
def test_keep_rate(p: float) -> None:
    n = 3 * 400 * 500
    rate = keep_mask(as_seed(11, "cpu"), p, (0, 3), (0, 400), (0, 500)).float().mean().item()
    kept = 1 - drop_count(p) / 256
    assert abs(rate - kept) < 5 * (kept * (1 - kept) / n) ** 0.5


def test_rounding_of_p_and_exact_scale() -> None:
    assert [drop_count(p) for p in (0.0, 0.001, 1 / 512, 0.1, 0.5, 0.999, 1.0)] == [
        0, 0, 1, 26, 128, 256, 256,
    ]  # fmt: skip
    for k in range(256):
        assert drop_count(k / 256) == k
        assert abs(keep_scale(k / 256) * (256 - k) / 256 - 1) < 1e-15
    assert keep_scale(1.0) == 0.0
    seed = as_seed(1, "cpu")
    assert not keep_mask(seed, 1.0, (0, 2), (0, 64), (0, 64)).any()
    least = keep_mask(seed, 1 / 256, (0, 1), (0, 64), (0, 64))
    assert torch.equal(least, random_bytes(seed, (0, 1), (0, 64), (0, 64)) != 0)


def test_seed_forms_agree() -> None:
    assert as_seed(-1, "cpu").tolist() == [-1] == as_seed(2**64 - 1, "cpu").tolist()
    assert as_seed(torch.tensor(7, dtype=torch.int32), "cpu").tolist() == [7]
    torch.manual_seed(4)
    first = draw_seed("cpu")
    torch.manual_seed(4)
    assert torch.equal(first, as_seed(None, "cpu")) and first.shape == (1,)
    assert not torch.equal(first, draw_seed("cpu"))


def test_attention_drops_exactly_these_probabilities() -> None:
    """With values that are unit vectors, the output is the probabilities."""
    batch, heads, seqlen = 2, 3, 40
    q, k = torch.randn(2, batch, seqlen, heads, 8).double().unbind(0)
    v = torch.eye(seqlen).double()[None, :, None].expand(batch, -1, heads, -1)
    clean = attention_reference(q, k, v)
    dropped = attention_reference(q, k, v, dropout_p=0.3, dropout_seed=17)
    keep = torch.tensor([
        [[slow_byte(17, h, i, j) >= 77 for j in range(seqlen)] for i in range(seqlen)]
        for h in range(batch * heads)
    ])  # fmt: skip
    keep = keep.view(batch, heads, seqlen, seqlen).transpose(1, 2)
    assert_close(dropped, torch.where(keep, clean * 256 / (256 - 77), 0.0), "rounding", name="out")


def test_expectation_is_that_of_no_dropout() -> None:
    q, k, v = torch.randn(3, 1, 16, 2, 8).double().unbind(0)
    clean = attention_reference(q, k, v)
    runs = torch.stack([
        attention_reference(q, k, v, dropout_p=0.4, dropout_seed=seed) for seed in range(1000)
    ])  # fmt: skip
    deviation = runs.std(0) / 1000**0.5
    assert ((runs.mean(0) - clean).abs() < 6 * deviation).all()


def test_zero_draws_nothing_and_one_gives_zeros() -> None:
    q, k, v = torch.randn(3, 1, 16, 2, 8).unbind(0)
    before = torch.get_rng_state()
    assert torch.equal(attention_reference(q, k, v, dropout_p=0.0), attention_reference(q, k, v))
    assert torch.equal(attention_reference(q, k, v, dropout_p=0.001), attention_reference(q, k, v))
    assert torch.equal(torch.get_rng_state(), before)
    attention_reference(q, k, v, dropout_p=0.5)
    assert not torch.equal(torch.get_rng_state(), before)
    case = Case("all", dropout_p=1.0)
    for run in (run_direct, run_blockwise):
        results = run(case, make_inputs(case))
        assert not results["out"].any() and not results["dv"].any()
        assert results["lse"].isfinite().all()


def test_lse_is_that_of_no_dropout() -> None:
    q, k, v = torch.randn(3, 1, 16, 2, 8).unbind(0)
    _, clean = attention_reference(q, k, v, return_lse=True)
    _, dropped = attention_reference(q, k, v, dropout_p=0.5, dropout_seed=1, return_lse=True)
    assert torch.equal(clean, dropped)
