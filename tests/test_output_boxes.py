"""O that leaves by TMA (sm90/output_boxes.h), as it does in calls with more tiles than CTAs of rows
whose CTAs share an SM: it has the bits of O that threads store."""

from __future__ import annotations

import pytest
import torch

from cute_attention import attention, kernels
from cute_attention.native import rows
from every_row import DTYPES, fixture_of
from shared_memory import CONSUMERS_OF_SM, ctas_of_sm

pytestmark = pytest.mark.gpu

row = fixture_of([row for row in rows.table() if ctas_of_sm(row) > 1])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "heads_kv", "head_dim"),
    [
        pytest.param(49, 49, 2, 2, 64, id="less than a tile"),
        pytest.param(128, 128, 2, 2, 64, id="whole tiles"),
        pytest.param(201, 77, 2, 1, 64, id="the end of a tile"),
        pytest.param(70, 130, 3, 3, 40, id="fewer columns than the row"),
        pytest.param(5, 100, 8, 2, 64, id="four heads in a tile"),
        pytest.param(9, 64, 12, 2, 64, id="a group that does not fill its tiles"),
        pytest.param(2, 64, 32, 1, 64, id="more heads in a tile than a box has"),
    ],
)
def test_bits_are_those_of_threads(
    row: rows.TableRow,
    queries: int,
    keys: int,
    heads: int,
    heads_kv: int,
    head_dim: int,
    causal: bool,
) -> None:
    """A call with one entry of the batch has no more tiles than there are CTAs."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    batch = CONSUMERS_OF_SM * multiprocessors // heads_kv + 3
    q, k, v = (
        torch.randn(batch, tokens, of, head_dim, device="cuda").to(DTYPES[row.dtype])
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
