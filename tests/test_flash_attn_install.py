"""bert_padding, and install(): flash-attn's names in sys.modules, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import cute_attention
from cute_attention.flash_attn import flash_attn_varlen_func
from cute_attention.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flash_attn_plain import CLOSE, plain

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])


@pytest.mark.parametrize("trailing", [(), (5,), (2, 3)])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_padding_goes_and_comes_back(trailing: tuple[int, ...], kind: torch.dtype) -> None:
    x = torch.randn(3, 4, *trailing, dtype=torch.float64, requires_grad=True)
    mask = MASK.to(kind)
    rows, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    assert indices.tolist() == [0, 1, 2, 9, 11]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 3, 3, 5], torch.int32)
    assert type(longest) is int
    assert longest == 3
    assert (used.tolist(), used.dtype) == ([3, 0, 2], torch.int32)
    back = pad_input(rows, indices, 3, 4)
    keep = MASK.bool().view(3, 4, *(1 for _ in trailing))
    assert torch.equal(back, x * keep)
    torch.autograd.gradcheck(lambda x: unpad_input(x, mask)[0], x)
    torch.autograd.gradcheck(lambda rows: pad_input(rows, indices, 3, 4), rows)


def test_unused_tokens_keep_their_rows() -> None:
    x = torch.arange(12.0).view(3, 4)
    unused = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    rows, _, cu_seqlens, longest, used = unpad_input(x, MASK, unused)
    assert rows.tolist() == [0, 1, 2, 3, 8, 9, 11]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 4, 4, 7], 4, [3, 0, 2])


def test_sequences_that_share_a_row() -> None:
    lengths = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0], [1, 1, 1, 0]])
    x = torch.arange(12.0).view(3, 4, 1)
    rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert rows.flatten().tolist() == indices.tolist()
    assert (cu_seqlens.tolist(), longest) == ([0, 2, 3, 7, 8, 9, 10], 4)


def test_rows_by_index() -> None:
    x = torch.arange(12.0).view(4, 3)
    index = torch.tensor([2, 0])
    assert torch.equal(index_first_axis(x, index), x[index])
    whole = index_put_first_axis(x[index], index, 4)
    assert torch.equal(whole[index], x[index])
    assert not whole[[1, 3]].any()


def test_attention_without_padding() -> None:
    q = torch.randn(3, 4, 2, 8)
    rows, indices, cu_seqlens, longest, _ = unpad_input(q, MASK)
    out = flash_attn_varlen_func(rows, rows, rows, cu_seqlens, cu_seqlens, longest, longest)
    padded = pad_input(out, indices, 3, 4)
    expected = plain(q[:1, :3], q[:1, :3], q[:1, :3])[0]
    torch.testing.assert_close(padded[:1, :3].double(), expected, **CLOSE)
    assert not padded[1].any()


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_install() -> None:
    printed = run(
        """
import sys
import cute_attention
assert not [name for name in sys.modules if "flash_attn" in name or "integrations" in name]
import cute_attention.flash_attn as ours
ours.install()
ours.install()
import importlib.util, importlib.metadata, inspect
import flash_attn, flash_attn_interface, flash_attn.layers.rotary
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import _flash_attn_forward, _get_block_size_n
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn_interface import flash_attn_func as third, flash_attn_combine
import cute_attention.flash_attn_interface as ours_3
assert flash_attn_func is ours.flash_attn_func
assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn_func
assert flash_attn.bert_padding.unpad_input is unpad_input
assert third is ours_3.flash_attn_func and third is not flash_attn_func
for name in ("flash_attn", "flash_attn_interface", "flash_attn.bert_padding"):
    spec = importlib.util.find_spec(name)
    assert spec.name == name and sys.modules[name].__spec__ is spec
assert flash_attn.__name__ == "flash_attn"
assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn")
assert importlib.metadata.version("flash-attn") == flash_attn.__version__
assert importlib.metadata.version("torch")
modules = importlib.metadata.packages_distributions()
assert modules["flash_attn"] == modules["flash_attn_interface"] == ["flash-attn"]
assert modules["torch"] == ["torch"]
try:
    importlib.metadata.version("flash-attn-4")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    raise AssertionError
try:
    import flash_attn.losses
except ModuleNotFoundError as error:
    print(error)
import torch
q = torch.randn(1, 3, 2, 8)
print(flash_attn_func(q, q, q).shape)
"""
    )
    assert printed.splitlines() == [
        "No module named 'flash_attn.losses'",
        "torch.Size([1, 3, 2, 8])",
    ]


def test_install_refuses_to_come_late() -> None:
    printed = run(
        """
import sys, types
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
import cute_attention.flash_attn
try:
    cute_attention.flash_attn.install()
except RuntimeError as error:
    print(error)
assert "flash_attn_interface" not in sys.modules
"""
    )
    assert printed.startswith("install: flash_attn is imported already")


def test_every_door_opens_in_a_package_of_another_name() -> None:
    """As the Hugging Face Hub's loader names it, where there is no package `cute_attention`."""
    printed = run(
        f"""
import importlib.util, sys, torch
package = {os.path.dirname(cute_attention.__file__)!r}
spec = importlib.util.spec_from_file_location("hub_name", package + "/__init__.py")
ours = importlib.util.module_from_spec(spec)
sys.modules["hub_name"] = ours
sys.modules["cute_attention"] = None  # importing it fails
spec.loader.exec_module(ours)
from hub_name import flash_attn, flash_attn_interface, inference
from hub_name.integrations import sdpa, transformers
q = torch.randn(1, 3, 2, 8)
assert torch.equal(flash_attn_interface.flash_attn_func(q, q, q), ours.attention(q, q, q))
assert inference.attention_with_cache(q, q, q, 3).shape == q.shape
flash_attn.install()
from flash_attn import flash_attn_func
from flash_attn.bert_padding import unpad_input
print(flash_attn_func.__module__, unpad_input.__module__)
"""
    )
    assert printed.split() == [
        "hub_name.integrations.flash_attn.dense",
        "hub_name.integrations.flash_attn.bert_padding",
    ]


def test_transformers_finds_what_is_installed() -> None:
    pytest.importorskip("transformers")
    printed = run(
        """
import torch
torch.cuda.is_available = lambda: True
torch.version.cuda = "13.0"
import cute_attention.flash_attn
cute_attention.flash_attn.install()
from transformers.utils import import_utils
print(import_utils.is_flash_attn_2_available(), import_utils.is_flash_attn_3_available())
"""
    )
    assert printed.split() == ["True", "False"]
