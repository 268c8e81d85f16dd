"""The built libraries: what they need of the machine, and the torch binding in this torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_attention.native import core

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [core.library_folder(), ROOT / "build" / "audit" / "lib"]
LIBRARIES = sorted({path for folder in FOLDERS if folder for path in folder.glob("*.so")})
BINDING = core.torch_library()

each_library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
needs_binding = pytest.mark.skipif(BINDING is None, reason="the torch binding is not installed")


def undefined_symbols(library: Path) -> list[str]:
    """Lines of `nm`: a kind and a demangled name."""
    command = ["nm", "--dynamic", "--undefined-only", "--demangle", library]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def dynamic_section(library: Path, tag: str) -> list[str]:
    command = ["readelf", "--dynamic", "--wide", library]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.findall(rf"\({tag}\).*\[(.*)\]", text)


def test_there_are_libraries():
    assert "libcute_attention.so" in {library.name for library in LIBRARIES}


@each_library
def test_no_symbol_of_libtorch_cxx_or_python(library):
    symbols = undefined_symbols(library)
    assert len(symbols) > 5
    unstable = re.compile(r"\b(c10|at|torch)::|\b_?Py[A-Z_]\w*")
    assert [symbol for symbol in symbols if unstable.search(symbol)] == []


@each_library
def test_needs_neither_cuda_nor_python(library):
    needed = dynamic_section(library, "NEEDED")
    assert "libc.so.6" in needed
    assert [name for name in needed if re.match(r"lib(cuda|python|nv|c10|torch_)", name)] == []


@each_library
def test_no_path_of_the_build_machine(library):
    paths = dynamic_section(library, "RUNPATH") + dynamic_section(library, "RPATH")
    assert set(paths) <= {"$ORIGIN"}


@needs_binding
def test_cuda_stream_symbol_is_weak():
    assert "w aoti_torch_get_current_cuda_stream" in [
        symbol.strip() for symbol in undefined_symbols(BINDING)
    ]


@needs_binding
def test_binding_loads_and_has_its_schema():
    core.core()
    torch.ops.load_library(BINDING)
    assert str(torch.ops.cute_attention.forward.default._schema) == (
        "cute_attention::forward(Tensor q, Tensor k, Tensor v, str backend, float scale, "
        "SymInt window_left=-1, SymInt window_right=-1, float softcap=0., "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, "
        "SymInt max_seqlen_k=0, Tensor? bias=None, Tensor? alibi_slopes=None, Tensor? sink=None, "
        "float dropout_p=0., Tensor? dropout_seed=None) -> (Tensor out, Tensor lse)"
    )
    assert str(torch.ops.cute_attention.brief_backward.default._schema) == (
        "cute_attention::brief_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, "
        "bool deterministic, Tensor q, Tensor k, Tensor v, str options) "
        "-> (Tensor dq, Tensor dk, Tensor dv)"
    )
    for op in ("forward", "forward.output", "backward"):
        for name in (op, f"brief_{op}", f"brief_packed_{op}"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"cute_attention::{name}", "CUDA")
    q = torch.zeros(1, 2, 3, 64, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        torch.ops.cute_attention.forward(q, q, q, "sm80", 1.0)


def test_the_kernel_ops_need_no_binding_to_be_traced():
    """Schemas, fakes and FLOP formulas are there after the import, where no kernel is."""
    program = """
import torch
import cute_attention
from torch.utils.flop_counter import FlopCounterMode

q, k = torch.empty(1, 5, 4, 64, device="meta"), torch.empty(1, 7, 2, 64, device="meta")
options = ("sm80", 1.0, 3, 0)
with FlopCounterMode(display=False) as counter:
    out, lse = torch.ops.cute_attention.forward(q, k, k, *options)
    results = (out, None, out, lse, False)
    grads = torch.ops.cute_attention.backward(*results, q, k, k, *options)
    alone = torch.ops.cute_attention.forward.output(q, k, k, *options)
    text = "sm80 1.0 3 0 0.0"
    brief, brief_lse = torch.ops.cute_attention.brief_forward(q, k, k, text)
    brief_alone = torch.ops.cute_attention.brief_forward.output(q, k, k, text)
    brief_grads = torch.ops.cute_attention.brief_backward(*results, q, k, k, text)
offsets = torch.empty(3, dtype=torch.int32, device="meta")
rows, keys = q[0], k[0]
packed = (rows, keys, keys, text, offsets, offsets, 5, 7)
parts = torch.ops.cute_attention.brief_packed_forward(*packed)
assert [t.shape for t in parts] == [rows.shape, (4, 5)]
assert torch.ops.cute_attention.brief_packed_forward.output(*packed).shape == rows.shape
packed_results = (rows, None, *parts, False)
packed_grads = torch.ops.cute_attention.brief_packed_backward(*packed_results, *packed)
assert [t.shape for t in packed_grads] == [rows.shape, keys.shape, keys.shape]
assert [t.shape for t in (brief, brief_lse, brief_alone)] == [t.shape for t in (out, lse, alone)]
assert [t.shape for t in brief_grads] == [t.shape for t in grads[:3]]
assert alone.shape == q.shape
assert (out.shape, lse.shape) == (q.shape, (1, 4, 5))
assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape, (0,), (0,)]
assert not torch._C._dispatch_has_kernel_for_dispatch_key("cute_attention::forward", "CUDA")
assert not torch.cuda.is_initialized()
print(counter.get_total_flops())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == 2 * (2 * 5 * 7 * 4 * (2 + 5 + 2) * 64)


@needs_binding
def test_loading_everything_leaves_cuda_alone():
    program = (
        "import torch\nfrom cute_attention.native import core\ncore.kernels()\n"
        f"torch.ops.load_library({str(BINDING)!r})\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(open('/proc/self/maps').read().count('libcuda.so'))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "0"
