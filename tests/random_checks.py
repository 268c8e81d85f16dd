"""Makes a random call, and compares all that it returns with the formula in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import BackendError, Explanation, attention, explain
from cute_attention.bench.roundings import LIMITS, exact
from cute_attention.inference import merge_attention
from random_calls import Drawn
from random_tensors import Made, make
from random_ways import attend, in_its_way
from tolerances import assert_same_bits

Results = dict[str, Tensor]


class Wrong(AssertionError):
    """A result that is wrong: which, by how much, and what was allowed."""

    def __init__(self, result: str, text: str) -> None:
        super().__init__(f"{result}: {text}")
        self.result = result


def rows_of(explanation: Explanation) -> list[str]:
    """The kernels that a call runs on, or its backends where these are none."""
    found = []
    for chosen, reports in (
        (explanation.chosen, explanation.forward),
        (explanation.chosen_backward, explanation.backward),
    ):
        mine = [row.name for r in reports if r.backend == chosen for row in r.rows if row.chosen]
        found += mine or ([chosen] if chosen else [])
    return found


def explained(made: Made, backend: str) -> list[str]:
    """The rows of a dense or packed call."""
    leaves, learnt = _leaves(made)
    answer = explain(
        *leaves, *made.packing, **learnt, **made.options, deterministic=made.drawn.deterministic,
        backend=backend,
    )  # fmt: skip
    return rows_of(answer)


def check(call: Drawn, device: str, backend: str = "auto") -> list[str]:
    """Makes the call, and raises Wrong where a result is. Returns the rows that it ran on.

    Where it would run on the reference backend unasked, or the backend refuses it, it is not
    made."""
    try:
        return _checked(call, device, backend)
    except BackendError:
        if backend == "reference":
            raise
        return ["not served"]  # by the kernels that alone may


def _checked(call: Drawn, device: str, backend: str) -> list[str]:
    if call.kind == "cache":
        from random_cache import check_cache

        return check_cache(call, device, backend)
    made = make(call, device)
    if call.splits:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUTE_ATTENTION_SPLITS", str(call.splits))
            return _check(made, backend)
    return _check(made, backend)


def _check(made: Made, backend: str) -> list[str]:
    call = made.drawn
    rows = explained(made, backend)
    if backend == "auto" and any(row in ("reference", "") for row in rows):
        return ["not served"]
    before = [bits(t).clone() for t in (*made.tensors, *made.learnt.values())]
    found = run(made, backend)
    compare(made, found)
    for old, new in zip(before, (*made.tensors, *made.learnt.values()), strict=True):
        if not torch.equal(old, bits(new)):
            raise Wrong("inputs", "the call changed them")
    again = run(made, backend)
    for name in found if call.deterministic else found.keys() & {"out", "lse", "dbias"}:
        try:
            assert_same_bits(again[name], found[name], name)
        except AssertionError as error:
            raise Wrong(name, f"not repeated: {error}") from None
    if call.kind == "merge":
        _check_merge(made, backend)
    return rows


def bits(tensor: Tensor) -> Tensor:
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(size)


def _leaves(made: Made) -> tuple[list[Tensor], Results]:
    learns = bool(made.drawn.grads)
    leaves = [t.detach().requires_grad_(learns) for t in made.tensors[:3]]
    return leaves, {n: t.detach().requires_grad_(learns) for n, t in made.learnt.items()}


def run(made: Made, backend: str) -> Results:
    """Output, LSE and gradients of a call, made in its way, in memory that was full of NaN."""
    return in_its_way(made.drawn.way, lambda: _run(made, backend))


def _run(made: Made, backend: str) -> Results:
    call = made.drawn
    leaves, learnt = _leaves(made)
    poison(made.tensors[0].device)
    options = {**learnt, **made.options, "deterministic": call.deterministic}
    out, lse = attend(call.way, leaves, made.packing, options, backend)
    found = {"out": out.detach(), "lse": lse.detach()}
    if call.grads:
        grads = {"out": made.tensors[3], "lse": made.grad_lse}
        results = {"out": out, "lse": lse}
        poison(made.tensors[0].device)
        values = torch.autograd.grad(
            [results[name] for name in call.grads], [*leaves, *learnt.values()],
            [grads[name] for name in call.grads],
        )  # fmt: skip
        names = ("dq", "dk", "dv", *(f"d{name}" for name in learnt))
        found |= dict(zip(names, values, strict=True))
    return found


def poison(device: torch.device) -> None:
    """Fills with NaN what the allocator hands out next."""
    sizes = range(8, 23) if device.type == "cuda" else range(10, 16)
    old = [torch.full((2**count,), torch.nan, device=device) for count in sizes]
    del old


def compare(made: Made, found: Results) -> None:
    """Raises Wrong for the first result that rounding does not explain."""
    sums = {
        name: [torch.zeros_like(found[name], dtype=torch.float64) for _ in range(2)]
        for name in found.keys() & {"dbias", "dsink"}  # sums over the sequences
    }
    for part in parts_of(made):
        values = part.of(found)
        for name, expected in part.exact.values.items():
            if name in values and name not in sums:
                judge(name, values[name], expected, part.exact.sizes[name], part.exact.eps[name])
        for name, old in sums.items():
            value, size = part.whole(name)
            sums[name] = [old[0] + value, old[1] + size.square()]
    eps = torch.finfo(found["out"].dtype).eps
    for name, (value, size2) in sums.items():
        judge(name, found[name], value, size2.sqrt(), eps)
    _check_what_nobody_has(made, found)


def judge(name: str, found: Tensor, expected: Tensor, size: Tensor, eps: float) -> None:
    """The rule of `bench.roundings`, value by value."""
    if found.shape != expected.shape:
        raise Wrong(name, f"shape {list(found.shape)}, expected {list(expected.shape)}")
    same = found.double() == expected
    kind = torch.finfo(found.dtype)
    smallest = max(kind.smallest_normal * kind.eps, 2.0**-100 * kind.eps)
    share = (found.double() - expected).abs() / (eps * size + smallest)
    share = share.nan_to_num(nan=torch.inf).masked_fill(same, 0.0)
    # A number beyond the largest of the dtype is infinite, and may be; one that rounding may carry
    # there, too.
    share = share.masked_fill(expected.abs() > kind.max, 0.0)
    reached = expected * found.double().sign() + LIMITS[name] * eps * size
    share = share.masked_fill(found.isinf() & (reached > kind.max), 0.0)
    if not share.numel():
        return
    worst = float(share.max())
    if not worst <= LIMITS[name]:
        place = [int(i) for i in torch.unravel_index(share.argmax(), share.shape)]
        many = int((share > LIMITS[name]).sum())
        raise Wrong(
            name,
            f"{worst:.3g} roundings at {place}: {float(found[tuple(place)]):.6g}, expected "
            f"{float(expected[tuple(place)]):.6g}, allowed {LIMITS[name]:g}; {many} of "
            f"{share.numel()}",
        )


class Part:
    """Sequences of one length: their places in the results, and what is right there."""

    def __init__(self, made: Made, first: int, rows: Any, keys: Any) -> None:
        call, options = made.drawn, dict(made.options)
        self.rows, self.keys, self.first = rows, keys, first
        self.packed = call.kind == "packed"
        places = (rows, keys, keys, rows)
        q, k, v, grad = (
            t if rows is None else t[place][None]
            for t, place in zip(made.clean.tensors, places, strict=True)
        )
        grad_lse = made.clean.grad_lse
        grad_lse = grad_lse if rows is None else grad_lse[:, rows][None]
        if "out" not in call.grads:
            grad = torch.zeros_like(grad)
        options["grad_lse"] = grad_lse if "lse" in call.grads else None
        if self.packed and options.get("alibi_slopes", grad).dim() == 2:
            options["alibi_slopes"] = options["alibi_slopes"][first : first + 1]
        self.learnt, self.made = dict(made.clean.learnt), made
        if (bias := self.learnt.get("bias")) is not None:
            bias = bias[(None,) * (4 - bias.dim())]
            self.learnt["bias"] = bias[self._places(bias)]
        self.exact = exact(q, k, v, grad, **options, **self.learnt, batch_start=first)

    def _places(self, bias: Tensor) -> tuple[slice, ...]:
        """What the sequences read of a bias of four dimensions."""
        if self.rows is None:
            return (slice(None),) * 4
        many = (self.rows.stop - self.rows.start, self.keys.stop - self.keys.start)
        own = (slice(self.first, self.first + 1), slice(None), slice(many[0]), slice(many[1]))
        return tuple(
            place if n > 1 else slice(None) for place, n in zip(own, bias.shape, strict=True)
        )

    def of(self, found: Results) -> Results:
        """The results of these sequences, with a batch dimension."""
        if self.rows is None:
            return found
        places = {"out": self.rows, "dq": self.rows, "dk": self.keys, "dv": self.keys}
        mine = {name: found[name][place][None] for name, place in places.items() if name in found}
        return mine | {"lse": found["lse"][:, self.rows][None]}

    def whole(self, name: str) -> tuple[Tensor, Tensor]:
        """Gradient and size of the whole bias or sink."""
        own = self.exact.values[name], self.exact.sizes[name]
        if name == "dsink":
            return own
        bias = self.made.learnt["bias"]
        wide = [t.new_zeros((1,) * (4 - bias.dim()) + bias.shape) for t in own]
        for each, mine in zip(wide, own, strict=True):
            each[self._places(each)] = mine
        return wide[0].view(bias.shape), wide[1].view(bias.shape)


def parts_of(made: Made) -> Iterator[Part]:
    """The sequences that have queries. Rows without keys have an LSE where there is a sink, which
    then has its gradient."""
    call = made.drawn
    if not call.heads:
        return
    if call.kind != "packed":
        if call.lengths and call.lengths[0][0]:
            yield Part(made, 0, None, None)
        return
    start_q = start_k = 0
    for first, (queries, keys) in enumerate(call.lengths):
        if queries:
            rows, places = slice(start_q, start_q + queries), slice(start_k, start_k + keys)
            yield Part(made, first, rows, places)
        start_q, start_k = start_q + queries, start_k + keys


def _check_what_nobody_has(made: Made, found: Results) -> None:
    """Sequences without queries or keys, and rows behind the last: zeros, and the LSE of a sink."""
    call = made.drawn
    sink = made.learnt.get("sink")
    start_q = start_k = 0
    lengths = list(call.lengths) if call.kind == "packed" else list(call.lengths[:1])
    if call.kind == "packed":
        lengths.append((call.padding, call.padding))
    for index, (queries, keys) in enumerate(lengths):
        behind = call.kind == "packed" and index == len(lengths) - 1
        rows, places = slice(start_q, start_q + queries), slice(start_k, start_k + keys)
        start_q, start_k = start_q + queries, start_k + keys
        if queries and keys and not behind:
            continue
        sides = {"out": rows, "dq": rows, "dk": places, "dv": places}
        for name in found.keys() & sides:
            own = found[name][sides[name]] if call.kind == "packed" else found[name]
            if own.any():
                raise Wrong(name, "not 0 where a sequence has no queries or no keys")
        own = found["lse"][..., rows] if call.kind == "packed" else found["lse"]
        expected = torch.full_like(own, -torch.inf)
        if sink is not None and not behind:
            expected = sink[:, None].expand_as(own)
        if not torch.allclose(own, expected, rtol=1e-6, atol=0):
            raise Wrong("lse", "not -inf, or that of the sink, in rows that see no key")


def _check_merge(made: Made, backend: str) -> None:
    """The keys in two parts: what is merged is right for what the parts were."""
    q, k, v = made.tensors[:3]
    middle = made.drawn.seed % (k.shape[1] + 1)
    parts = [
        attention(q, k[:, place], v[:, place], return_lse=True, backend=backend)
        for place in (slice(0, middle), slice(middle, None))
    ]
    outs, lses = zip(*parts, strict=True)
    out, lse = merge_attention(outs, lses)
    wide = [t.double() for t in outs], [t.double() for t in lses]
    right, right_lse = merge_attention(*wide)
    size, _ = merge_attention([t.abs() for t in wide[0]], wide[1])
    judge("out", out, right, size, torch.finfo(out.dtype).eps)
    ulp = torch.finfo(torch.float32).eps
    judge("lse", lse, right_lse, right_lse.abs().nan_to_num(0, 0, 0).clamp_min(1), ulp)
