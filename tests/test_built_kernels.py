"""Kernels that Python builds or loads: they serve only who asks, and the choice knows them at once.

What compiles is not nvcc but the C++ compiler, with a launch class and a GPU that are made up
(fake_nvcc.py). A process cannot unload a library, so each test has a process of its own.
"""

from __future__ import annotations

import pytest

import test_dispatch
from built_rows import ON_A_GPU, run
from cute_attention.native import core

pytestmark = pytest.mark.skipif(not core.available(), reason="the core library is not installed")


def test_a_built_kernel_serves_only_calls_that_ask_for_it(tmp_path):
    done = run(
        tmp_path,
        ON_A_GPU
        + """
assert kernels() == []
kernel = row.build()
assert kernel.name.startswith(row.name + "_") and kernel.on_request
assert (kernel.tile_n, kernel.threads, kernel.shared_memory_bytes) == (32, 128, 24576)
assert kernel in kernels() and row.build() == kernel and len(kernels()) == 1
from cute_attention.native import kernel_cache
assert len(kernel_cache.clear()) == 1
assert row.build() == kernel and kernel_cache.entries() == [], "it is loaded, and needs no file"

# No call takes it by itself.
with pytest.warns(cute_attention.FallbackWarning, match="it serves only calls that ask for it"):
    assert select("auto", *KIND) == "reference"
assert select("auto", *KIND._replace(row=kernel.name)) == "sm80"
assert select("sm80", *KIND._replace(row=kernel.name)) == "sm80"
for requested in ("sm90", "reference"):
    with pytest.raises(BackendError, match=f"asks for kernel {kernel.name!r} of backend 'sm80', "
                                           f"and for backend {requested!r}"):
        select(requested, *KIND._replace(row=kernel.name))
with pytest.raises(BackendError, match="cannot serve this call(.*\\\\n)*.*head_dim 128 is above"):
    select("auto", *KIND._replace(row=kernel.name, head_dim=128))
with pytest.raises(BackendError, match="it computes the forward pass"):
    select("auto", *KIND._replace(row=kernel.name, direction="backward"))
with pytest.raises(BackendError, match="asks for kernel no_such_kernel"):
    select("auto", *KIND._replace(row="no_such_kernel"))

# The call, the context and explain.
q = torch.zeros(1, 16, 2, 64, dtype=torch.float16)
for asked in (kernel, (kernel,)):
    with pytest.raises(BackendError, match="q is on cpu, not on a CUDA device"):
        attention(q, q, q, kernel=asked)
with rows.use(kernel):
    with pytest.raises(BackendError, match="q is on cpu, not on a CUDA device"):
        attention(q, q, q)
    answer = explain(q, q, q)
    assert answer.chosen is None and kernel.name in answer.requested
    assert [r.name for report in answer.forward for r in report.rows] == [kernel.name]
    with rows.use():
        assert attention(q, q, q).shape == q.shape
assert attention(q, q, q).shape == q.shape
with pytest.raises(ValueError, match="kernel has two forward kernels"):
    attention(q, q, q, kernel=(kernel, kernel))
(seen,) = [r for r in explain(q, q, q).forward[1].rows if r.name == kernel.name]
assert seen.on_request and seen.reasons[0] == "it serves only calls that ask for it"

# Calls with a cache, which is read where it lies or packed before.
from cute_attention.inference import attention_with_cache, explain_with_cache
cache = torch.zeros(1, 32, 2, 64, dtype=torch.float16)
for options in ({}, {"attention_chunk": 8}):
    call = (q[:, :1], cache, cache, 7)
    with rows.use(kernel):
        with pytest.raises(BackendError, match="q is on cpu, not on a CUDA device"):
            attention_with_cache(*call, **options)
        answer = explain_with_cache(*call, **options)
        assert answer.chosen is None and kernel.name in answer.requested
        assert [r.name for report in answer.forward for r in report.rows] == [kernel.name]
        with pytest.raises(BackendError, match="kernel .* cannot serve this call: no kernel prom"):
            attention_with_cache(*call, batch_invariant=True, attention_chunk=8)
    assert attention_with_cache(*call, **options).shape == (1, 1, 2, 64)
""",
    )
    assert done.returncode == 0, done.stderr


def test_ops_are_told_the_kernel_and_contexts_are_of_a_thread(tmp_path):
    """On fake CUDA tensors, which need no GPU: what the ops of the kernels are called with."""
    library = test_dispatch.build(tmp_path / "later", "later")
    done = run(
        tmp_path,
        ON_A_GPU
        + f"""
import threading, warnings
from cute_attention import call
from cute_attention.dispatch.plans import backward_of
warnings.simplefilter("ignore")

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "cute_attention" in str(function):
            named.append(next(a for a in args if isinstance(a, str)).split()[0])
        return function(*args, **(kwargs or {{}}))

def ran(**options):
    named.clear()
    with FakeTensorMode(), Seen():
        q = torch.empty(1, 16, 2, 64, dtype=torch.float16, device="cuda")
        attention(q, q, q, **options)
    (name,) = named
    return name

named = []
kernel, other = row.build(), rows.Row.of("sm80_fwd_fp16_d64", stages=2).build()
assert kernel != other
for _ in range(2):
    assert ran(kernel=kernel) == kernel.name
    assert ran() == "reference"
with rows.use(kernel):
    assert ran() == kernel.name
    assert ran(kernel=other) == other.name, "the argument wins"
    with rows.use(other):
        assert ran() == other.name
        found = []
        thread = threading.Thread(target=lambda: found.append(ran()))
        thread.start()
        thread.join()
        assert found == ["reference"], "another thread asks for nothing"
    assert ran() == kernel.name
assert ran() == "reference"

@rows.use(kernel)
def decorated():
    return ran()
assert decorated() == kernel.name

# The gradient: chosen as always, or the kernel that was asked for when the forward ran.
added = {{k.name: k for k in rows.load_library({str(library)!r})}}
small, reader = added["fake_sm80_bwd_d64_small"], added["fake_sm80_d64_small"]
assert ran() == "sm80", "plans from before the library are not used"
def gradient(*kernels):
    with FakeTensorMode():
        q = torch.empty(1, 16, 2, 64, dtype=torch.float16, device="cuda")
        with rows.use(*kernels):
            plan, _ = call._attend_checked("attention", q, q, q, (), {{}})
    return plan.choices[0], backward_of(plan).options[0].split()[0]
assert gradient() == ("sm80", "sm80")
assert gradient(kernel) == (kernel.name, "sm80")
assert gradient(small) == ("sm80", small.name)
assert gradient(small, kernel) == (kernel.name, small.name)

# Calls with a cache: its op is told the kernel, and where the cache is packed, the call inside.
from cute_attention.inference import choice
from cute_attention.inference.checked import checked_cache
def told(**options):
    with FakeTensorMode():
        q = torch.empty(1, 1, 2, 64, dtype=torch.float16, device="cuda")
        cache = torch.empty(1, 32, 2, 64, dtype=torch.float16, device="cuda")
        lengths = torch.empty(1, dtype=torch.int32, device="cuda")
        given = choice.with_defaults("attention_with_cache", options)
        return choice.choose(checked_cache(q, cache, cache, lengths, given))[1]
assert told() == told(attention_chunk=8) == "sm80"
with rows.use(reader):
    assert (told(), told(attention_chunk=8)) == (reader.name, "sm80")
""",
    )
    assert done.returncode == 0, done.stderr


def test_a_library_loaded_later_takes_part(tmp_path):
    """The kinds that were asked for before are chosen anew."""
    later = test_dispatch.build(tmp_path / "one", "later")
    again = test_dispatch.build(tmp_path / "two", "again")
    asked = test_dispatch.build(tmp_path / "three", "asked", FAKE_SUFFIX='"_asked"')
    old = test_dispatch.build(tmp_path / "old", "old", FAKE_ABI=12345, FAKE_SUFFIX='"_old"')
    done = run(
        tmp_path,
        ON_A_GPU
        + f"""
import shutil, warnings
warnings.simplefilter("ignore")
assert select("auto", *KIND) == "reference"
added = rows.load_library({str(asked)!r}, on_request=True)
assert len(added) == 8 and all(kernel.on_request for kernel in added)
assert select("auto", *KIND) == "reference"
added = rows.load_library({str(later)!r})
assert len(added) == 8 and added == kernels()[-8:] and not added[0].on_request
assert select("auto", *KIND) == "sm80"
assert rows.load_library({str(later)!r}) == []
for path, message in (
    ({str(again)!r}, "a row called fake_sm80_d64_small is loaded already"),
    ({str(old)!r}, "it has kernel ABI 12345"),
    ({str(tmp_path / "no.so")!r}, "no.so: cannot open shared object"),
):
    with pytest.raises(rows.BuildError, match=message):
        rows.load_library(path)
shutil.copy({str(again)!r}, {str(later)!r} + ".new")
shutil.move({str(later)!r} + ".new", {str(later)!r})
with pytest.raises(rows.BuildError, match="has changed since this process loaded it"):
    rows.load_library({str(later)!r})
small, large = "fake_sm80_d64_small", "fake_sm80_d64_large"
from cute_attention.native import core
for row, expected in (("", large), (small, small), (small + "_asked", small + "_asked")):
    problem = KIND._replace(row=row, seqlen_q=8192, seqlen_k=8192, heads=16, heads_kv=4)
    (chosen,) = [c.name for c in core.explain(problem, 0) if c.chosen and c.backend == "sm80"]
    assert chosen == expected, (row, chosen)
""",
    )
    assert done.returncode == 0, done.stderr


JIT = (
    ON_A_GPU
    + """
import warnings
from cute_attention.dispatch import jit
jit.chip_of = lambda device: (80, 163 * 1024)
warnings.simplefilter("error")
def names():
    return [kernel.name for kernel in kernels()]
"""
)


def test_missing_rows_are_built_when_a_call_needs_them(tmp_path):
    done = run(
        tmp_path,
        JIT
        + """
with pytest.warns(cute_attention.FallbackWarning):
    assert select("auto", *KIND) == "reference"  # off by default
rows.jit(True)
assert select("auto", *KIND) == "sm80" and names() == ["sm80_fwd_fp16_d64"]
assert select("auto", *KIND) == "sm80"
# A smaller head dim has a row of its own, and one between them is served by the next larger.
assert select("sm80", *KIND._replace(head_dim=30, head_dim_v=30)) == "sm80"
assert names()[1:] == ["sm80_fwd_fp16_d32"] and not kernels()[1].on_request
assert select("auto", *KIND._replace(head_dim=40, head_dim_v=40)) == "sm80"
assert select("auto", *KIND._replace(features=4)) == "sm80", "every row serves a sink"
assert len(names()) == 2
assert select("auto", *KIND._replace(softcap=1.0, features=2, head_dim=72)) == "sm80"
assert names()[2:] == ["sm80_fwd_fp16_d128_softcap_alibi"]
rows.jit(False)
with pytest.warns(cute_attention.FallbackWarning):
    assert select("auto", *KIND._replace(dtype="bf16")) == "reference"
rows.jit(True)
warnings.simplefilter("ignore")
for unserved in ({"features": 16}, {"dtype": "fp32"}, {"head_dim": 512}):
    assert select("auto", *KIND._replace(**unserved)) == "reference"
assert len(names()) == 3
""",
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if ": built" in line]
    assert len(said) == 3


def test_a_row_that_cannot_be_built_is_told_once(tmp_path):
    done = run(
        tmp_path,
        JIT
        + """
for message in ("sm80_fwd_fp16_d64 could not be built: (.*\\\\n)*.*too large",):
    with pytest.warns(UserWarning, match=message), pytest.warns(cute_attention.FallbackWarning):
        assert select("auto", *KIND) == "reference"
assert select("auto", *KIND._replace(window_right=0)) == "reference"  # without a second attempt
assert names() == []
""",
        CUTE_ATTENTION_JIT="1",
        FAKE_NVCC="fail",
    )
    assert done.returncode == 0, done.stderr
    wrong = run(
        tmp_path,
        JIT
        + """
with pytest.raises(ValueError, match="CUTE_ATTENTION_JIT is 'yes', expected 0 or 1"):
    select("auto", *KIND)
with pytest.raises(TypeError, match="on is int, expected a bool"):
    rows.jit(1)
""",
        CUTE_ATTENTION_JIT="yes",
    )
    assert wrong.returncode == 0, wrong.stderr
