"""The examples of docs/serving.md run as they are written, at sizes that a test can afford."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from cute_attention import attention
from tolerances import assert_close

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "serving.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_every_example() -> None:
    first, books, parts = BLOCKS
    names: dict[str, Any] = {}
    exec(first, names)
    assert names["out"].shape == (4, 1, 32, 128)
    assert names["cache_seqlens"].tolist() == [18, 401, 1, 2]
    exec(books.replace("pages=512", "pages=80").replace("layers=32", "layers=1"), names)
    assert names["step"].cache_seqlens.tolist() == [900, 900, 900]
    assert names["cache"].free_pages == 80 - 56 - 1 - 1 - 3  # 57 pages, whose last is partly filled
    names["q"], k, v = torch.randn(3, 1, 8, 2, 16).unbind()
    names["shards"] = [(k[:, :3], v[:, :3]), (k[:, 3:], v[:, 3:])]
    exec(parts, names)
    assert_close(names["out"], attention(names["q"], k, v), "rounding")
