"""O that leaves by TMA (sm90/output_boxes.h), as it does in calls with more tiles than CTAs: it has
the bits of O that threads store."""

from __future__ import annotations

import pytest
import torch

from cute_attention import attention, kernels
from cute_attention.native import rows
from every_row import DTYPES, fixture_of
from shared_memory import CONSUMERS_OF_SM

pytestmark = pytest.mark.gpu

row = fixture_of(
    row
    for row in rows.table()
    if (row.arch, row.direction, row.score_mods) == ("sm90", "forward", ())
    and row.head_dim == row.head_dim_v in (64, 128)
)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "heads_kv", "missing"),
    [
        pytest.param(49, 49, 2, 2, 0, id="less than a tile"),
        pytest.param(128, 128, 2, 2, 0, id="whole tiles"),
        pytest.param(201, 77, 2, 1, 0, id="the end of a tile"),
        pytest.param(70, 130, 3, 3, 24, id="fewer columns than the row"),
        pytest.param(5, 100, 8, 2, 0, id="four heads in a tile"),
        pytest.param(9, 64, 12, 2, 0, id="a group that does not fill its tiles"),
        pytest.param(2, 64, 32, 1, 0, id="more heads in a tile than a box has"),
    ],
)
def test_bits_are_those_of_threads(
    row: rows.TableRow,
    queries: int,
    keys: int,
    heads: int,
    heads_kv: int,
    missing: int,
    causal: bool,
) -> None:
    """A call with one entry of the batch has no more tiles than there are CTAs. So many columns are
    `missing` to the row's."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    batch = CONSUMERS_OF_SM * multiprocessors // heads_kv + 3
    q, k, v = (
        torch.randn(batch, tokens, of, row.head_dim - missing, device="cuda").to(DTYPES[row.dtype])
        for tokens, of in ((queries, heads), (keys, heads_kv), (keys, heads_kv))
    )
    (kernel,) = (kernel for kernel in kernels() if kernel.name == row.name)
    o, lse = attention(q, k, v, causal=causal, kernel=kernel, return_lse=True)
    for entry in (0, 1, batch // 2, batch - 1):
        own = slice(entry, entry + 1)
        alone = attention(q[own], k[own], v[own], causal=causal, kernel=kernel, return_lse=True)
        assert torch.equal(o[own], alone[0])
        assert torch.equal(lse[own], alone[1])
    assert torch.equal(o, attention(q, k, v, causal=causal, kernel=kernel))
