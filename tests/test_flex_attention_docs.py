"""The examples of docs/flex_attention.md: what they compute with flex_attention and with us."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.xdist_group("flex")  # whose import takes longer than all examples
PAGE = Path(__file__).resolve().parents[1] / "docs" / "flex_attention.md"
PREPARATION, *EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
TITLES = [
    re.findall(r"(?m)^## (.+)$", before)[-1]
    for before in (PAGE.read_text().split("```python\n" + code)[0] for code in EXAMPLES)
]
# An example may go on with what the one before it has defined.
GOES_ON = {index for index, title in enumerate(TITLES) if index and TITLES[index - 1] == title}


def test_the_page_is_read():
    assert len(EXAMPLES) >= 14
    rows = PAGE.read_text().split("|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 12


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("index", range(len(EXAMPLES)), ids=TITLES)
def test_example(index):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 48, 16, dtype=torch.float64)  # without gradients on the CPU
    names = {"q": q, "k": k, "v": v}
    exec(PREPARATION, names)
    if index in GOES_ON:
        exec(EXAMPLES[index - 1], names)
    exec(EXAMPLES[index], names)
    torch.testing.assert_close(names["ours"], names["theirs"], atol=1e-5, rtol=1e-5)
