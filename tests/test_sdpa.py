"""PyTorch's attention through our kernels: what PyTorch calls while our provider is active.

`scaled_dot_product_attention` takes the operators of flash attention and of memory-efficient
attention on a GPU alone. On the CPU, where PyTorch has no kernels for them, they are called
directly: autograd, the provider and everything below it are the same.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"),
    reason="PyTorch registers flash attention, and restores its own, from 2.11 on",
)

aten = torch.ops.aten


@pytest.fixture
def provider():
    """Our provider, active."""
    from cute_attention.integrations import sdpa

    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    yield
    torch.nn.attention.restore_flash_attention_impl()


def draw(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)


def exact(q, k, v, is_causal=False, mask=None, scale=None):
    """The formula, top-left causal, GQA."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def assert_same(run, reference, tensors, tolerance=1e-9):
    """Output and gradients of `run` are those of `reference`."""
    out, expected = run(*tensors), reference(*tensors)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad, retain_graph=True)
    for have, want in zip(grads, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(have, want, atol=tolerance, rtol=0)


def test_it_is_registered_and_changes_nothing_before_it_is_activated():
    from cute_attention.integrations import sdpa

    sdpa.register()
    assert sdpa.NAME in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() != sdpa.NAME
    q = draw(1, 2, 8, 16)
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
        aten._scaled_dot_product_flash_attention(q, q, q)


def test_activate_and_restore():
    from cute_attention.integrations import sdpa

    before = torch.backends.cuda.cudnn_sdp_enabled()
    sdpa.activate()
    assert torch.nn.attention.current_flash_attention_impl() == sdpa.NAME
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    q = draw(1, 2, 8, 16)
    with pytest.raises(NotImplementedError):
        aten._scaled_dot_product_flash_attention(q, q, q)


# 2.10 has the first, but not the second.
@pytest.mark.parametrize(
    "missing", ["register_flash_attention_impl", "restore_flash_attention_impl"]
)
def test_older_pytorch_is_told(monkeypatch, missing):
    from cute_attention.integrations import sdpa

    monkeypatch.delattr(torch.nn.attention, missing)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    message = (
        rf"needs PyTorch 2\.11 or newer, and this is 2\.10\.0: torch.nn.attention has no {missing}"
    )
    with pytest.raises(RuntimeError, match=message):
        sdpa.register()
    importlib.reload(sdpa)  # importing it registers nothing there, and raises nothing


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlens", [(24, 24), (24, 40), (40, 24)])
def test_flash_operator(provider, heads_kv, is_causal, seqlens):
    torch.manual_seed(0)
    q = draw(2, 4, seqlens[0], 16)
    k, v = draw(2, heads_kv, seqlens[1], 16), draw(2, heads_kv, seqlens[1], 16)
    assert_same(
        lambda *t: aten._scaled_dot_product_flash_attention(*t, is_causal=is_causal, scale=0.3)[0],
        lambda *t: exact(*t, is_causal=is_causal, scale=0.3),
        (q, k, v),
    )


@pytest.mark.parametrize("shape", [(2, 4, 24, 40), (1, 1, 24, 40), (2, 1, 1, 40), (1, 4, 24, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_are_biases(provider, shape, is_causal):
    torch.manual_seed(0)
    q, k, v = draw(2, 4, 24, 16), draw(2, 4, 40, 16), draw(2, 4, 40, 24)
    assert_same(
        lambda q, k, v, m: aten._scaled_dot_product_efficient_attention(
            q, k, v, m, True, is_causal=is_causal
        )[0],
        lambda q, k, v, m: exact(q, k, v, is_causal, m),
        (q, k, v, draw(*shape)),
    )


def test_strides_and_shapes_are_those_that_pytorch_promises(provider):
    """Compiled code relies on what the fake operators say."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = [torch.randn(2, 24, 4, 16).transpose(1, 2) for _ in range(3)]  # strides of models
    contiguous = [t.contiguous() for t in inputs]
    mask = torch.randn(2, 4, 24, 24)
    calls = [
        (aten._scaled_dot_product_flash_attention, inputs),
        (aten._scaled_dot_product_flash_attention, contiguous),
        (aten._scaled_dot_product_efficient_attention, [*inputs, mask, True]),
        (aten._scaled_dot_product_efficient_attention, [*contiguous, None, False]),
    ]
    for op, arguments in calls:
        real = op(*arguments)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            fake = op(*fakes)
        for have, want in zip(real, fake, strict=True):
            if isinstance(want, torch.Tensor):
                assert have.shape == want.shape
                assert have.stride() == want.stride()
                assert have.dtype == want.dtype
            else:
                assert have == want


def test_dropout_comes_from_the_generator(provider):
    q, k, v = draw(2, 2, 64, 16), draw(2, 2, 64, 16), draw(2, 2, 64, 16)

    def run(op, *rest):
        return op(q, k, v, *rest, dropout_p=0.5)[0]

    for op, rest in (
        (aten._scaled_dot_product_flash_attention, ()),
        (aten._scaled_dot_product_efficient_attention, (None, True)),
    ):
        torch.manual_seed(7)
        first, second = run(op, *rest), run(op, *rest)
        torch.manual_seed(7)
        assert torch.equal(run(op, *rest), first)
        assert not torch.equal(first, second)
        # The gradient drops what the forward dropped: d(out)/dv is linear in v.
        torch.manual_seed(7)
        out = run(op, *rest)
        (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
        torch.testing.assert_close((dv * v).sum(), out.sum())


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 2)])
def test_varlen_attn(provider, window):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    torch.manual_seed(0)
    offsets = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    q, k, v = draw(30, 4, 16), draw(30, 2, 16), draw(30, 2, 16)

    def formula(q, k, v):
        parts = []
        for start, end in ((0, 7), (7, 30)):
            one = [t[start:end].transpose(0, 1)[None] for t in (q, k, v)]
            distance = torch.arange(end - start) - torch.arange(end - start)[:, None]
            left, right = (end if side < 0 else side for side in window)
            mask = torch.zeros(distance.shape, dtype=q.dtype)
            mask.masked_fill_((distance < -left) | (distance > right), -torch.inf)
            parts.append(exact(*one, mask=mask)[0].transpose(0, 1))
        return torch.cat(parts)

    options = {"window_size": window}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:  # from 2.12 on
        options["enable_gqa"] = True

    def run(q, k, v):
        return varlen.varlen_attn(q, k, v, offsets, offsets, 23, 23, **options)

    assert_same(run, formula, (q, k, v))


def test_varlen_attn_under_compile(provider):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    offsets = torch.tensor([0, 7, 30], dtype=torch.int32)
    q, k, v = (draw(30, 2, 16, dtype=torch.float32) for _ in range(3))
    run = lambda *t: varlen.varlen_attn(*t, offsets, offsets, 23, 23)  # noqa: E731
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_same(compiled, run, (q, k, v), 1e-6)


def test_wrong_arguments_have_pytorchs_names(provider):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    offsets = torch.tensor([0, 30], dtype=torch.int32)
    q, k = draw(30, 2, 16), draw(30, 2, 24)
    with pytest.raises(ValueError, match="varlen_attn: key has head dim 24, expected 16"):
        varlen.varlen_attn(q, k, k, offsets, offsets, 30, 30)
    with pytest.raises(TypeError, match=r"varlen_attn: cu_seq_q is of dtype torch\.int64"):
        varlen.varlen_attn(q, q, q, offsets.long(), offsets, 30, 30)
    if "seqused_k" in inspect.signature(varlen.varlen_attn).parameters:  # from 2.12 on
        with pytest.raises(NotImplementedError, match="varlen_attn: seqused_k is not served"):
            varlen.varlen_attn(q, q, q, offsets, offsets, 30, 30, seqused_k=offsets[1:])
    q, k = draw(1, 2, 8, 16), draw(1, 2, 8, 16, dtype=torch.float32)
    with pytest.raises(TypeError, match="scaled_dot_product_attention: key has dtype"):
        aten._scaled_dot_product_flash_attention(q, k, k)


def test_calls_without_a_kernel_of_ours_go_to_the_kernel_of_pytorch():
    """With a library that stands for PyTorch's own kernels: no kernel of ours serves the CPU."""
    from cute_attention.integrations import sdpa

    calls = []

    def theirs(query, key, value, *rest, **options):
        calls.append(options)
        lse = query.new_zeros(query.shape[:3], dtype=torch.float32)
        nothing = torch.zeros(2, dtype=torch.uint64)
        return query.clone(), lse, None, None, 8, 8, nothing, nothing[0], query.new_empty(0)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_flash_attention", theirs, "CPU")
        try:
            sdpa.activate()
        except RuntimeError as error:
            assert "already a kernel registered from python" in str(error)
            pytest.skip("this PyTorch takes one kernel from Python, and the stand-in is one")
        try:
            q = torch.randn(1, 2, 8, 16)
            out = aten._scaled_dot_product_flash_attention(q, q, q, is_causal=True, scale=0.5)[0]
        finally:
            torch.nn.attention.restore_flash_attention_impl()
        assert torch.equal(out, q)
        assert len(calls) == 1


def test_import_registers_no_kernel():
    """What a provider must not do: activate itself."""
    code = (
        "import torch, cute_attention.integrations.sdpa\n"
        "print(torch.nn.attention.current_flash_attention_impl())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "None\n", result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads_kv", "seqlens", "is_causal", "masked"),
    [
        (4, (256, 256), True, False),
        (2, (256, 256), True, False),
        (4, (256, 384), True, False),
        (4, (384, 256), True, False),
        (4, (256, 384), False, True),
        (2, (200, 200), False, False),
    ],
)
def test_sdpa_on_a_gpu(provider, dtype, heads_kv, seqlens, is_causal, masked):
    """The public function, against the formula in float64 and against PyTorch's own kernels."""
    torch.manual_seed(0)
    q = draw(2, 4, seqlens[0], 64, device="cuda", dtype=dtype)
    k, v = (draw(2, heads_kv, seqlens[1], 64, device="cuda", dtype=dtype) for _ in range(2))
    seen = torch.rand(2, 1, *seqlens, device="cuda") > 0.3 if masked else None
    bias = None
    if seen is not None:
        bias = torch.zeros(seen.shape, dtype=torch.float64, device="cuda")
        bias.masked_fill_(~seen, -torch.inf)
    inputs = (q, k, v)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)  # so gradients are float64
    expected = exact(*wide, is_causal, bias)
    grad = torch.randn_like(q)
    wanted = torch.autograd.grad(expected, wide, grad.double())

    def errors():
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=is_causal, enable_gqa=True
        )
        grads = torch.autograd.grad(out, inputs, grad)
        pairs = zip((out, *grads), (expected, *wanted), strict=True)
        return [(a.double() - b.double()).abs().max().item() for a, b in pairs]

    ours = errors()
    torch.nn.attention.restore_flash_attention_impl()
    with sdpa_kernel(SDPBackend.MATH):
        theirs = errors()
    torch.nn.attention.activate_flash_attention_impl("cute_attention")
    assert all(a <= 2 * b + 1e-3 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.gpu
def test_our_kernels_run_on_a_gpu(provider):
    q = draw(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    with torch.profiler.profile() as profile:
        out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        out.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert any("cute_attention" in name for name in names), sorted(names)
