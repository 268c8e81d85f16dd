"""What a result must not depend on: the sequences packed beside it, and the order of batch entries,
heads and sequences. Bits are compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.bench.adversarial import ADVERSARIAL
from cute_attention.bench.roundings import NAMES
from cute_attention.native import rows
from every_row import (
    ALL,
    DTYPES,
    backend_of,
    fixture_of,
    options_of,
    skip_if_places_matter,
    skip_unless_it_is_chosen,
)
from kernel_calls import offsets
from tolerances import assert_near, assert_same_bits

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (200, 0)},
}
HEADS = {"mha": (4, 4), "gqa": (4, 2)}
# The rows at which the sequences end, for queries and for keys. The tests change the middle
# sequence. 129 rows are one more than a tile has, so tiles of each sequence reach into the next
# one.
KERNELS = ((0, 129, 258, 558), (0, 1024, 2048, 2948))
REFERENCE = ((0, 29, 58, 120), (0, 64, 130, 190))
TAIL = 70  # rows after the last sequence, if the backend allows them

Results = dict[str, Tensor]


def run(function: Callable[..., Any], inputs: list[Tensor], grad_out: Tensor) -> Results:
    """Output, LSE and deterministic gradients by name."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = function(*leaves, return_lse=True, deterministic=True)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


# --- neighbours ----------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "x100": lambda t: t * 100,
    "nan": lambda t: torch.full_like(t, math.nan),
    "+inf": lambda t: torch.full_like(t, math.inf),
    "-inf": lambda t: torch.full_like(t, -math.inf),
}


def changed(tensors: list[Tensor], cu: list[list[int]], change: str, tail: bool) -> list[Tensor]:
    """The tensors with the middle sequence, and rows of no sequence, changed."""
    found = []
    for tensor, ends in zip(tensors, cu, strict=True):
        copy = tensor.clone()
        copy[ends[1] : ends[2]] = CHANGES[change](tensor[ends[1] : ends[2]])
        if tail:
            copy[ends[3] :] = CHANGES[change](tensor[ends[3] :])
        found.append(copy)
    return found


def check_neighbours(
    backend: str,
    dims: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    options: dict[str, Any],
    device: str,
) -> None:
    ends_q, ends_k = (list(ends) for ends in (REFERENCE if device == "cpu" else KERNELS))
    tail = 0 if device == "cpu" else TAIL
    torch.manual_seed(0)
    shapes = (
        (ends_q[-1], heads[0], dims[0]),
        (ends_k[-1], heads[1], dims[0]),
        (ends_k[-1], heads[1], dims[1]),
        (ends_q[-1], heads[0], dims[1]),
    )
    clean = [torch.randn(n + tail, *rest, device=device).to(dtype) for n, *rest in shapes]
    cu = [ends_q, ends_k, ends_k, ends_q]
    cu_seqlens = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in cu[:2]]
    longest = [max(b - a for a, b in itertools.pairwise(ends)) for ends in cu[:2]]

    def call(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return attention_varlen(q, k, v, *cu_seqlens, *longest, backend=backend, **options, **more)

    expected = run(call, clean[:3], clean[3])
    assert all(tensor.isfinite().all() for name, tensor in expected.items() if name != "lse")
    variants = {f"{change} in all": changed(clean, cu, change, tail > 0) for change in CHANGES}
    variants["x100 in q alone"] = [*changed(clean[:1], cu[:1], "x100", False), *clean[1:]]
    for variant, tensors in variants.items():
        found = run(call, tensors[:3], tensors[3])
        for name in NAMES:
            ends = ends_k if name in ("dk", "dv") else ends_q
            for sequence in (0, 2):
                rows_of_it = slice(ends[sequence], ends[sequence + 1])
                index = (slice(None), rows_of_it) if name == "lse" else (rows_of_it,)
                where = f"{variant}: {name} of sequence {sequence}"
                assert_same_bits(found[name][index], expected[name][index], where)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_reference_does_not_feel_neighbours(
    options: dict[str, Any], heads: tuple[int, int]
) -> None:
    check_neighbours("reference", (16, 8), heads, torch.bfloat16, options, "cpu")


row = fixture_of(ALL, skip_unless_it_is_chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_a_sequence_does_not_feel_its_neighbours(
    row: rows.TableRow, options: dict[str, Any], heads: tuple[int, int]
) -> None:
    check_neighbours(
        backend_of(row),
        (row.head_dim, row.head_dim_v),
        heads,
        DTYPES[row.dtype],
        options_of(row, options, heads[0]),
        "cuda",
    )


# --- order ---------------------------------------------------------------------------------------

# The inputs of the batch entries, or of the sequences: one row with extreme scores, maxima that
# grow, tiles that are hidden as a whole, and ordinary inputs.
ENTRIES = ("random_x1", "mix_x100", "steps_300_per_64_left", "hidden_inf_first")
ORDER = [2, 0, 3, 1]  # of batch entries and sequences
HEAD_ORDERS = {  # of the 4 query heads, and of the 2 KV heads
    "heads": ([2, 3, 0, 1], [1, 0]),
    "heads of one KV head": ([1, 0, 3, 2], [0, 1]),
}


def in_order(results: Results, order: list[int], axes: dict[str, int]) -> Results:
    return {
        name: results[name].index_select(axis, torch.tensor(order, device=results[name].device))
        for name, axis in axes.items()
    }


def assert_permuted(found: Results, expected: Results, what: str) -> None:
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor, f"{name} where {what} are permuted")


def entries(
    seqlen_q: int, seqlen_k: int, dims: tuple[int, int], dtype: torch.dtype, device: str
) -> list[Tensor]:
    """q, k, v and the gradient of the output, one of ENTRIES in each batch entry; 4 and 2 heads."""
    torch.manual_seed(0)
    pairs = []
    for name in ENTRIES:
        q = torch.randn(1, seqlen_q, 4, dims[0], device=device)
        k = torch.randn(1, seqlen_k, 2, dims[0], device=device)
        pairs.append(ADVERSARIAL[name].make(q, k, dtype))
    q, k = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    v = torch.randn(len(ENTRIES), seqlen_k, 2, dims[1], device=device).to(dtype)
    return [q, k, v, torch.randn(len(ENTRIES), seqlen_q, 4, dims[1], device=device).to(dtype)]


def check_dense_order(
    backend: str, dims: tuple[int, int], dtype: torch.dtype, options: dict[str, Any], device: str
) -> None:
    seqlens = (70, 150) if device == "cpu" else (257, 700)
    tensors = entries(*seqlens, dims, dtype, device)

    def call(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return attention(q, k, v, backend=backend, **options, **more)

    expected = run(call, tensors[:3], tensors[3])
    turned = [t[ORDER] for t in tensors]
    found = run(call, turned[:3], turned[3])
    assert_permuted(found, in_order(expected, ORDER, dict.fromkeys(NAMES, 0)), "batch entries")
    for what, (order_q, order_k) in HEAD_ORDERS.items():
        orders = (order_q, order_k, order_k, order_q)
        turned = [t[:, :, order] for t, order in zip(tensors, orders, strict=True)]
        found = run(call, turned[:3], turned[3])
        wanted = in_order(expected, order_q, {"out": 2, "lse": 1, "dq": 2})
        if what == "heads":  # dk and dv are sums over query heads, in the order of these heads
            wanted |= in_order(expected, order_k, {"dk": 2, "dv": 2})
        assert_permuted(found, wanted, what)


def check_packed_order(
    backend: str, dims: tuple[int, int], dtype: torch.dtype, options: dict[str, Any], device: str
) -> None:
    """Sequences of unequal lengths, the ends of the batch entries."""
    lengths_q, lengths_k = [130, 7, 257, 64], [200, 700, 500, 330]
    if device == "cpu":
        lengths_q, lengths_k = [30, 7, 70, 33], [65, 150, 90, 80]
    tensors = entries(max(lengths_q), max(lengths_k), dims, dtype, device)
    lengths = (lengths_q, lengths_k, lengths_k, lengths_q)

    def packed(order: list[int]) -> Results:
        parts = [
            torch.cat([t[b, -n[b] :] for b in order]) for t, n in zip(tensors, lengths, strict=True)
        ]
        cu = [offsets([n[b] for b in order], device) for n in lengths[:2]]

        def call(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
            longest = max(lengths_q), max(lengths_k)
            return attention_varlen(q, k, v, *cu, *longest, backend=backend, **options, **more)

        results = run(call, parts[:3], parts[3])
        # Puts the results back in the order of the batch entries.
        back = [order.index(b) for b in range(len(order))]
        unpacked = {}
        for name, tensor in results.items():
            n = lengths_k if name in ("dk", "dv") else lengths_q
            axis = 1 if name == "lse" else 0
            pieces = tensor.split([n[b] for b in order], axis)
            unpacked[name] = torch.cat([pieces[place] for place in back], axis)
        return unpacked

    assert_permuted(packed(ORDER), packed([0, 1, 2, 3]), "sequences")


ORDER_MASKS = {name: MASKS[name] for name in ("full", "causal")}


@pytest.mark.parametrize("check", [check_dense_order, check_packed_order])
@pytest.mark.parametrize("options", ORDER_MASKS.values(), ids=ORDER_MASKS)
def test_reference_does_not_feel_the_order(
    options: dict[str, Any], check: Callable[..., None]
) -> None:
    check("reference", (16, 8), torch.bfloat16, options, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_dense_order, check_packed_order])
@pytest.mark.parametrize("options", ORDER_MASKS.values(), ids=ORDER_MASKS)
def test_the_order_permutes_the_bits(
    row: rows.TableRow, options: dict[str, Any], check: Callable[..., None]
) -> None:
    skip_if_places_matter(row)
    dims, options = (row.head_dim, row.head_dim_v), options_of(row, options, 4)
    if "alibi_slopes" in options:  # heads that change places must have the same slope
        options["alibi_slopes"] = torch.full((4,), 0.125, device="cuda")
    if "bias" in options:  # and the same bias
        options["bias"] = torch.full((1, 1, 1, 1), 0.5, device="cuda")
    check(backend_of(row), dims, DTYPES[row.dtype], options, "cuda")


# --- rows of a tile ------------------------------------------------------------------------------

UNUSUAL_ROWS = (5, 77, 200)  # queries of different warps


@pytest.mark.gpu
@pytest.mark.parametrize("options", ORDER_MASKS.values(), ids=ORDER_MASKS)
@pytest.mark.parametrize("kind", ["large", "hidden first"])
def test_rows_do_not_feel_unusual_ones(
    row: rows.TableRow, kind: str, options: dict[str, Any]
) -> None:
    """A few queries have scores of 10^4 and more, or see nothing but hidden keys in the tiles that
    kernels visit first: these tiles are computed in another way, for all rows of their warps
    (sm90/forward_scores.h). The bits of all other queries stay."""
    options = options_of(row, options, 4)
    torch.manual_seed(0)
    q = torch.randn(3, 257, 4, row.head_dim, device="cuda")
    k = torch.randn(3, 700, 2, row.head_dim, device="cuda")
    v = torch.randn(3, 700, 2, row.head_dim_v, device="cuda")
    q[..., 0] = 0
    k[:, -300:, :, 0] = -6e4
    q, k, v = (t.to(DTYPES[row.dtype]) for t in (q, k, v))
    unusual = q.clone()
    for query in UNUSUAL_ROWS:
        if kind == "large":
            unusual[:, query, :, 1:] *= 1e4
        else:
            unusual[:, query, :, 0] = 600

    def call(queries: Tensor) -> Any:
        return attention(queries, k, v, backend=backend_of(row), return_lse=True, **options)

    (out, lse), (expected, expected_lse) = call(unusual), call(q)
    others = [query for query in range(257) if query not in UNUSUAL_ROWS]
    assert_same_bits(out[:, others], expected[:, others], "output of the other queries")
    assert_same_bits(lse[..., others], expected_lse[..., others], "LSE of the other queries")
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("options", ORDER_MASKS.values(), ids=ORDER_MASKS)
@pytest.mark.parametrize("kind", ["shifted", "hidden first", "all shifted"])
def test_unusual_tiles_that_are_expected(
    row: rows.TableRow, kind: str, options: dict[str, Any]
) -> None:
    """Where many KV tiles of a tile of queries were unusual, a kernel may expect the same of the
    next (sm90/forward_compute.h). A sequence has the same bits where all others are unusual, too,
    and where none is."""
    options = options_of(row, options, 4)
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    batch = multiprocessors // 4 + 2  # two tiles or more for each CTA
    torch.manual_seed(0)
    q = torch.randn(batch, 257, 4, row.head_dim, device="cuda")
    k = torch.randn(batch, 700, 2, row.head_dim, device="cuda")
    v = torch.randn(batch, 700, 2, row.head_dim_v, device="cuda")
    q[..., 0] = 0
    k[:, -300:, :, 0] = -6e4
    q[..., 1], k[..., 1] = 0, 128
    q, k, v = (t.to(DTYPES[row.dtype]) for t in (q, k, v))
    unusual = q.clone()
    for query in range(257) if kind == "all shifted" else UNUSUAL_ROWS:
        if kind == "hidden first":
            unusual[:, query, :, 0] = 600
        else:
            unusual[:, query, :, 1] = 1024  # all scores are near 2^17 * scale

    def call(queries: Tensor) -> Any:
        return attention(queries, k, v, backend=backend_of(row), return_lse=True, **options)

    out, lse = call(unusual)
    for sequence in (0, batch // 2, batch - 1):
        beside_usual = q.clone()
        beside_usual[sequence] = unusual[sequence]
        expected, expected_lse = call(beside_usual)
        assert_same_bits(out[sequence], expected[sequence], f"output of sequence {sequence}")
        assert_same_bits(lse[sequence], expected_lse[sequence], f"LSE of sequence {sequence}")
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["keys", "keys in fp32", "tiles", "tiles in fp32"])
@pytest.mark.parametrize("low", [-torch.inf, -1e30])
def test_padded_sequences(row: rows.TableRow, low: float, form: str) -> None:
    """A bias hides all but the first 64 keys, so that most KV tiles are unusual and the next tiles
    of queries expect that. A sequence has the same bits where the others are not padded, and the
    output that it has without the hidden keys."""
    if row.score_mods != ("bias",):
        pytest.skip("rows with a bias alone")
    batch = torch.cuda.get_device_properties("cuda").multi_processor_count // 4 + 2
    dtype = DTYPES[row.dtype]
    torch.manual_seed(0)
    q = torch.randn(batch, 256, 4, row.head_dim, device="cuda").to(dtype)
    k = torch.randn(batch, 704, 2, row.head_dim, device="cuda").to(dtype)
    v = torch.randn(batch, 704, 2, row.head_dim_v, device="cuda").to(dtype)
    bias_dtype = torch.float32 if "fp32" in form or dtype == torch.float16 else dtype
    rows_of_bias = 1 if "keys" in form else 256
    bias = torch.zeros(batch, 1, rows_of_bias, 704, device="cuda", dtype=bias_dtype)
    bias[..., 64:] = low

    def call(bias: Tensor, keys: int = 704) -> Any:
        return attention(
            q, k[:, :keys], v[:, :keys], bias=bias[..., :keys], backend=backend_of(row)
        )

    out, visible = call(bias), call(torch.zeros_like(bias), 64)
    assert_near(out, visible.double(), "out")
    for sequence in (0, batch // 2, batch - 1):
        beside_others = torch.zeros_like(bias)
        beside_others[sequence] = bias[sequence]
        assert_same_bits(out[sequence], call(beside_others)[sequence], f"sequence {sequence}")


# --- the checks themselves -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "attention_varlen"])
def test_results_that_depend_on_others_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function whose output changes by about an ulp with the first number of q."""
    function = globals()[name]

    def leaks(q: Tensor, *rest: Any, **options: Any) -> Any:
        out, lse = function(q, *rest, **options)
        first = q.detach().flatten()[0].sign() if name == "attention" else q.detach().float().std()
        return out * (1 + 0.01 * first.to(out.dtype)), lse

    monkeypatch.setitem(globals(), name, leaks)
    with pytest.raises(AssertionError, match="values differ"):
        if name == "attention":
            check_dense_order("reference", (16, 8), torch.bfloat16, {}, "cpu")
        else:
            check_neighbours("reference", (16, 8), (4, 2), torch.bfloat16, {}, "cpu")
