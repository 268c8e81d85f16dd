"""torch.compile(fullgraph=True), torch.library.opcheck and FLOP counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from cute_attention import attention, attention_varlen, use_backend
from cute_attention.dispatch.select import select
from tolerances import assert_close

OPS = torch.ops.cute_attention


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Each test compiles again, and runs on the backend that every machine has."""
    torch._dynamo.reset()
    with use_backend("reference"):
        yield


class Graphs:
    """A compiler that counts the graphs it is given, then does what aot_eager does.

    The first call may count twice: dynamo starts again when a float turns out to be constant.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return torch._dynamo.lookup_backend("aot_eager")(module, examples)


def qkv(
    device: str, seqlen_q: int = 9, seqlen_k: int = 13, head_dim: int = 16, batch: int = 2
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((seqlen_q, 4, head_dim), (seqlen_k, 2, head_dim), (seqlen_k, 2, 24))
    return [torch.randn(batch, *shape, device=device, requires_grad=True) for shape in shapes]


def extras(device: str, seqlen_q: int = 9, seqlen_k: int = 13) -> dict[str, Any]:
    return {
        "bias": torch.randn(4, seqlen_q, seqlen_k, device=device, requires_grad=True),
        "sink": torch.randn(4, device=device, requires_grad=True),
        "alibi_slopes": torch.rand(2, 4, device=device),  # [batch, heads]
        "softcap": 3.0,
        "window": (7, None),
        "causal": True,
    }


def packed(device: str, *lengths: int) -> list[Any]:
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    q, k, v = (t.detach()[0].requires_grad_() for t in qkv(device, sum(lengths), sum(lengths)))
    return [q, k, v, offsets, offsets, max(lengths), max(lengths)]


def assert_same(run: Callable[..., Any], compiled: Callable[..., Any], *args: Any) -> None:
    """The results and the gradients of a function and of its compiled form."""
    leaves = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, Tensor)]
    leaves = [a for a in leaves if a.requires_grad]
    found = []
    for function in (run, compiled):
        out, lse = function(*args)
        total = out.square().sum() + lse.sum()
        found.append([out, lse, *torch.autograd.grad(total, leaves)])
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_close(actual, expected, "rounding")


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_every_argument(compiler: str, dynamic: bool, device: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        return attention(q, k, v, return_lse=True, **options)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=compiler)
    assert_same(run, compiled, *qkv(device), extras(device))


def test_the_same_tensor_thrice(device: str) -> None:
    def run(x: Tensor) -> Any:
        return attention(x, x, x, return_lse=True)

    assert_same(run, torch.compile(run, fullgraph=True, backend="aot_eager"), qkv(device)[1])


def test_varlen(device: str) -> None:
    def run(*args: Any) -> Any:
        return attention_varlen(*args, causal=True, return_lse=True)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="inductor")
    assert_same(run, compiled, *packed(device, 5, 0, 8))


def test_one_graph_serves_every_length() -> None:
    graphs = Graphs()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, causal=True, return_lse=True)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    for seqlen_q, seqlen_k, batch in ((5, 7, 3), (9, 13, 6), (128, 130, 5)):
        assert_same(run, compiled, *qkv("cpu", seqlen_q, seqlen_k, batch=batch))
        counts.append(graphs.count)
    assert counts == counts[:1] * 3
    assert_same(run, compiled, *qkv("cpu", head_dim=32, batch=3))  # on which the choice depends
    assert graphs.count > counts[0]


def test_one_graph_serves_every_packing() -> None:
    graphs = Graphs()

    def run(*args: Any) -> Any:
        return attention_varlen(*args, causal=True, return_lse=True)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    for lengths in ((5, 3), (4, 2, 9), (17, 30)):
        assert_same(run, compiled, *packed("cpu", *lengths))
        counts.append(graphs.count)
    assert counts == counts[:1] * 3


def test_changing_the_backend_recompiles() -> None:
    """A compiled function guards on `use_backend`, outside of it and inside."""
    graphs = Graphs()
    compiled = torch.compile(attention, fullgraph=True, backend=graphs)
    inputs = [t.detach() for t in qkv("cpu")]
    compiled(*inputs)
    assert graphs.count == 1
    with use_backend("auto"):
        compiled(*inputs)
    assert graphs.count == 2
    compiled(*inputs)
    assert graphs.count == 2

    @torch.compile(fullgraph=True, backend=graphs)
    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with use_backend("auto"):
            return attention(q, k, v)

    assert torch.equal(inside(*inputs), attention(*inputs))


def test_the_choice_is_made_while_compiling() -> None:
    """The graph contains only the op, so that no Python of this package runs in a call."""
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        seen.extend(str(n.target) for n in module.graph.nodes if n.op == "call_function")
        return module.forward

    torch.compile(attention, fullgraph=True, backend=backend)(*(t.detach() for t in qkv("cpu")))
    assert [name for name in seen if "getitem" not in name] == [
        "cute_attention.reference_forward.output"
    ]
    assert select._dynamo_marked_constant is True


def test_compiled_code_passes_few_arguments(device: str) -> None:
    """What has its default is left out: an op takes time for each argument that it is passed."""
    run_and_get_code = pytest.importorskip("torch._inductor.utils").run_and_get_code
    inputs = qkv(device)

    def run() -> None:
        out = torch.compile(lambda *args: attention(*args), fullgraph=True)(*inputs)
        torch.autograd.grad(out.sum(), inputs)

    with torch._inductor.config.patch(force_disable_caches=True):
        _, code = run_and_get_code(run)
    calls = [line for text in code for line in text.splitlines() if "= torch.ops.cute_att" in line]
    assert len(calls) == 2
    for line in calls:
        assert line.endswith("'reference', 0.25)")


def test_guards_are_few() -> None:
    """A compiled function guards on what the checks have read, at every call: not on the options
    that were not passed, nor on the table of arguments."""
    names: list[str] = []

    def keep(guards: Any) -> list[bool]:
        names.extend(f"{guard.name} {guard.guard_type}" for guard in guards)
        return [True] * len(guards)

    inputs = [t.detach() for t in qkv("cpu")]
    torch.compile(
        lambda *args: attention(*args, causal=True),
        fullgraph=True,
        backend="eager",
        options={"guard_filter_fn": keep},
    )(*inputs)
    assert any("_context" in name for name in names)  # of use_backend
    assert not any("_ASKING" in name or "OPTIONAL_TENSORS" in name for name in names)
    assert not any("CHECKS'][" in name or ".CHECKS[" in name for name in names)
    assert len(names) < 200


def test_dropout_follows_the_generator(device: str) -> None:
    inputs = [t.detach() for t in qkv(device)]
    compiled = torch.compile(
        lambda *args: attention(*args, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    results = []
    for run in (compiled, compiled, lambda *args: attention(*args, dropout_p=0.5)):
        torch.manual_seed(3)
        results.append(run(*inputs))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], compiled(*inputs))


def test_autocast_inside(device: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(q.device.type, dtype=torch.bfloat16):
            return attention(q, k, v)

    inputs = qkv(device)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, run(*inputs))


def test_checkpoint_inside(device: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, causal=True, return_lse=True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(attend, q, k, v, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(attend, compiled, *qkv(device))


def test_a_wrong_call_is_refused() -> None:
    compiled = torch.compile(attention, backend="aot_eager")
    q, k, v = qkv("cpu")
    with pytest.raises(ValueError, match="attention: v has shape"):
        compiled(q, k, v[:, :5])


def op_arguments(device: str, kind: str) -> tuple[Any, ...]:
    """Arguments of `reference_forward`: dense with every feature, or packed."""
    if kind == "packed":
        q, k, v, offsets, _, longest, _ = packed(device, 5, 0, 8)
        options = ("reference", 0.25, -1, 0, 0.0)
        return (q.detach(), k.detach(), v.detach(), *options, offsets, offsets, longest, longest)
    q, k, v = (t.detach() for t in qkv(device))
    options = extras(device)
    seed = torch.tensor([5], device=device)
    bias, sink = options["bias"].detach()[None], options["sink"].detach()
    return (q, k, v, "reference", 0.25, 7, 0, 3.0, None, None, 0, 0,
            bias, options["alibi_slopes"], sink, 0.5, seed)  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_opcheck_forward(kind: str, device: str) -> None:
    torch.library.opcheck(OPS.reference_forward.default, op_arguments(device, kind))
    torch.library.opcheck(OPS.reference_forward.output, op_arguments(device, kind))


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("needs", [(False, False), (True, True)], ids=["qkv", "all"])
def test_opcheck_backward(kind: str, needs: tuple[bool, bool], device: str) -> None:
    arguments = op_arguments(device, kind)
    needs = needs if kind == "dense" else ()
    out, lse = OPS.reference_forward(*arguments)
    grad_lse = torch.randn_like(lse) if True in needs else None
    torch.library.opcheck(
        OPS.reference_backward.default,
        (torch.randn_like(out), grad_lse, out, lse, False, *arguments, *needs),
    )


@pytest.mark.parametrize("seqlen_q", [0, 9])
@pytest.mark.parametrize("seqlen_k", [0, 13])
def test_fakes_know_empty_shapes(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = (t.detach() for t in qkv("cpu", seqlen_q, seqlen_k))
    real = attention(q, k, v, return_lse=True)
    fake = attention(q.to("meta"), k.to("meta"), v.to("meta"), return_lse=True)
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def counted(run: Callable[[], Tensor]) -> tuple[int, int]:
    """FLOPs of a forward, and of its backward."""
    with FlopCounterMode(display=False) as forward:
        out = run()
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_sdpa(causal: bool) -> None:
    """Two matrix products forward and five backward, and what PyTorch counts for its own."""
    q, k, v = qkv("cpu", 64, 64)
    product = 2 * 2 * 4 * 64 * 64  # of 2 batches and 4 heads, for each head dim
    assert counted(lambda: attention(q, k, v, causal=causal)) == (
        product * (16 + 24),
        product * (3 * 16 + 2 * 24),
    )
    shape = (2, 4, 64, 16)
    assert sdpa_flop_count(shape, shape, shape) == product * 2 * 16
    assert sdpa_backward_flop_count(shape, shape, shape, shape) == product * 5 * 16


def test_flops_of_packed_sequences() -> None:
    pairs = 5 * 5 + 8 * 8
    arguments = packed("cpu", 5, 0, 8)
    assert counted(lambda: attention_varlen(*arguments)) == (
        2 * pairs * 4 * (16 + 24),
        2 * pairs * 4 * (3 * 16 + 2 * 24),
    )
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        attention_varlen(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    assert counter.get_total_flops() == 2 * (3 * 8 * 8) * 4 * (16 + 24)
