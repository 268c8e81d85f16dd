"""THE table of arguments: what a call consists of once it is checked.

`Arguments` is that table and the record itself: one line for each argument of the ops, with its
type, its default, its check, what it asks of a kernel, and whether it has a gradient. The schemas
of the ops, the gradients that they return, the positions that autograd and FLOP formulas read, the
feature bits that dispatch compares and the words of `explain` are derived from it. `options.py` has
what users pass, `checked.py` makes the one of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from . import checks
from .problem import Problem


def _is_given(value: Any) -> bool:
    return value is not None


def is_positive(value: Any) -> bool:
    return holds(value > 0)


def _is_not_positive(value: Any) -> bool:
    return not is_for_kernels(value)


def is_for_kernels(scale: Any) -> bool:
    """Whether a scale is positive to kernels, which take smaller numbers of fp32 for 0."""
    return holds(scale >= 2.0**-126)  # kLeastScale of calls.cpp


class Argument(NamedTuple):
    """What the table says of an argument."""

    feature: str = ""  # the word of `explain` for what a call with it asks of a kernel
    bit: int = 0  # of Problem.features: Feature of c_api.h; 0 where a kernel is told otherwise
    asks: Callable[[Any], bool] = _is_given  # whether a value asks for the feature
    check: Callable[[str, str, Any, Arguments], None] | None = None  # of what the user passed
    gradient: bool = False
    # A plan that is kept serves calls with it: the kernels' ops check it, and of a tensor nothing
    # decides what runs but whether it is there.
    kept: bool = False


class Arguments(NamedTuple):
    """The checked arguments of a call, in the order of the ops' schemas: common ones come first,
    since a call through PyTorch's dispatcher takes time for each argument that it passes."""

    q: Annotated[Tensor, Argument(gradient=True)]
    k: Annotated[Tensor, Argument(gradient=True)]
    v: Annotated[Tensor, Argument(gradient=True)]
    backend: str  # "auto" until one is chosen
    scale: Annotated[
        float, Argument("nonpositive scale", 16, _is_not_positive, check=checks.number)
    ]
    window_left: int = -1  # unbounded
    window_right: int = -1
    softcap: Annotated[float, Argument("softcap", 0, is_positive, check=checks.softcap)] = 0.0
    cu_seqlens_q: Annotated[Tensor | None, Argument("varlen")] = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0  # of packed calls alone
    max_seqlen_k: int = 0
    bias: Annotated[
        Tensor | None, Argument("bias", 1, check=_check_bias, gradient=True, kept=True)
    ] = None
    alibi_slopes: Annotated[Tensor | None, Argument("alibi", 2, check=_check_slopes, kept=True)] = (
        None
    )
    sink: Annotated[
        Tensor | None, Argument("sink", 4, check=_check_per_head, gradient=True, kept=True)
    ] = None
    dropout_p: Annotated[
        float, Argument("dropout", 8, is_positive, check=checks.dropout_p, kept=True)
    ] = 0.0
    dropout_seed: Annotated[Tensor | None, Argument(check=_check_seed, kept=True)] = None

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after the other, as in `attention_varlen`."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.sizes()[0]

    @property
    def seqlen_q(self) -> int:
        """The length of q; packed, that of the longest sequence."""
        return self.sizes()[1]

    @property
    def seqlen_k(self) -> int:
        """The length of k; packed, that of the longest sequence."""
        return self.sizes()[2]

    def sizes(self) -> tuple[int, int, int]:
        """`batch`, `seqlen_q` and `seqlen_k`, for checks that torch.compile traces: it does not
        know properties of a named tuple in PyTorch 2.10."""
        if self.cu_seqlens_q is None:
            return self.q.shape[0], self.q.shape[1], self.k.shape[1]
        return self.cu_seqlens_q.shape[0] - 1, self.max_seqlen_q, self.max_seqlen_k


def _check_bias(name: str, label: str, value: object, call: Arguments) -> None:
    """Floating, on q's device, broadcastable to [batch, heads, seqlen_q, seqlen_k]."""
    checks.tensors(name, **{label: value})
    assert isinstance(value, Tensor)
    q = call.q
    if value.dtype not in (q.dtype, torch.float32):
        expected = " or ".join(dict.fromkeys((str(q.dtype), "torch.float32")))
        mask = (
            f"; a mask becomes a bias with torch.zeros_like(mask, dtype={q.dtype})"
            ".masked_fill(~mask, -torch.inf)"
        )
        raise TypeError(
            f"{name}: {label} has dtype {value.dtype}, expected {expected}"
            f"{mask if value.dtype == torch.bool else ''}"
        )
    checks.on_device(name, label, value, q.device)
    batch, seqlen_q, seqlen_k = call.sizes()
    shape = (batch, q.shape[-2], seqlen_q, seqlen_k)
    if not _broadcasts(value.shape, shape):
        names = (
            "[batch, heads, max_seqlen_q, max_seqlen_k]"
            if call.packed
            else "[batch, heads, seqlen_q, seqlen_k]"
        )
        raise ValueError(
            f"{name}: {label} has shape {list(value.shape)}, expected one that broadcasts to "
            f"{list(shape)} ({names})"
        )


def _broadcasts(shape: torch.Size, target: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` broadcasts to `target`, each of whose lengths a traced graph may
    know only when it runs: that graph then checks it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    if torch.compiler.is_compiling():
        for have, want in pairs:
            if have != 1:
                torch._check(have == want)
        return len(shape) <= len(target)
    return len(shape) <= len(target) and all(have == 1 or have == want for have, want in pairs)


def _check_slopes(name: str, label: str, value: object, call: Arguments) -> None:
    """`[heads]` or `[batch, heads]`, without a gradient."""
    heads = call.q.shape[-2]
    _check_vector(name, label, value, call)
    assert isinstance(value, Tensor)
    checks.without_gradient(name, value)
    shape = value.shape
    if len(shape) == 1 and shape[0] == heads:
        return
    batch = call.sizes()[0]
    if len(shape) == 2 and shape[0] == batch and shape[1] == heads:
        return
    raise ValueError(
        f"{name}: {label} has shape {list(shape)}, expected [{heads}] or [{batch}, {heads}] "
        "([heads] or [batch, heads])"
    )


def _check_per_head(name: str, label: str, value: object, call: Arguments) -> None:
    """`[heads]`."""
    _check_vector(name, label, value, call)
    assert isinstance(value, Tensor)
    heads = call.q.shape[-2]
    if value.dim() != 1 or value.shape[0] != heads:
        raise ValueError(
            f"{name}: {label} has shape {list(value.shape)}, expected [{heads}] ([heads])"
        )


def _check_vector(name: str, label: str, value: object, call: Arguments) -> None:
    """float32 on q's device; float64 too where q is, so that gradcheck can check gradients."""
    checks.tensors(name, **{label: value})
    assert isinstance(value, Tensor)
    q = call.q
    if value.dtype != torch.float32 and not value.dtype == q.dtype == torch.float64:
        raise TypeError(
            f"{name}: {label} has dtype {value.dtype}, expected torch.float32 "
            f"(pass {label}.float())"
        )
    checks.on_device(name, label, value, q.device)


def _check_seed(name: str, label: str, value: object, call: Arguments) -> None:
    """An int, or an int64 tensor of one element on q's device."""
    if isinstance(value, int) and not isinstance(value, bool):
        return
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: {label} is {checks.type_name(value)}, expected an int, an int64 tensor of "
            "one element or None"
        )
    if value.dtype != torch.int64:
        raise TypeError(f"{name}: {label} has dtype {value.dtype}, expected torch.int64")
    if value.numel() != 1:
        raise ValueError(
            f"{name}: {label} has shape {list(value.shape)}, expected one element, [1] or []"
        )
    checks.on_device(name, label, value, call.q.device)


NAMES = Arguments._fields
_DEFAULTS: dict[str, Any] = Arguments._field_defaults
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", float: "float", str: "str"}


def _table() -> Iterator[tuple[str, str, Argument]]:
    """Of each argument the name, the type in the schema, and what the table says."""
    for name, hint in get_type_hints(Arguments, include_extras=True).items():
        kind, *notes = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        yield name, _TYPES[kind], notes[0] if notes else Argument()


TABLE = {name: argument for name, _, argument in _table()}
SCHEMA = ", ".join(
    f"{kind} {name}" + (f"={_DEFAULTS[name]}" if name in _DEFAULTS else "")
    for name, kind, _ in _table()
)
GRADIENTS = tuple(name for name, argument in TABLE.items() if argument.gradient)
OPTIONAL_GRADIENTS = tuple(name for name in GRADIENTS if name in _DEFAULTS)
EXTRAS = NAMES[NAMES.index("cu_seqlens_q") :]  # left out of a call where all have their defaults
EXTRA_DEFAULTS = tuple(_DEFAULTS[name] for name in EXTRAS)
KEPT = frozenset(name for name, argument in TABLE.items() if argument.kept)
FEATURES = {argument.bit: argument.feature for argument in TABLE.values() if argument.bit}
CHECKS = {name: argument.check for name, argument in TABLE.items() if argument.check is not None}
# Passed on as the user gave them. The seed is none: it may be drawn, or made of an int.
OPTIONAL_TENSORS = tuple(
    name
    for name, kind, argument in _table()
    if kind == "Tensor?" and argument.check is not None and name != "dropout_seed"
)
_OPTIONAL = NAMES.index("bias")  # from here on all are None or 0 in a common call
_ASKING = tuple((name, argument) for name, argument in TABLE.items() if argument.feature)

DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def specialized(head_dim: int) -> int:
    """`head_dim` as a constant of a compiled graph, since the choice of a backend depends on it.

    torch.compile specialises on the bounds of a range.
    """
    return range(head_dim).stop


def holds(condition: bool) -> bool:
    """`condition` as a constant of a compiled graph.

    A comparison of symbolic numbers is none until a branch is taken on it.
    """
    if condition:  # noqa: SIM103
        return True
    return False


def feature_words(call: Arguments) -> list[str]:
    """What a call asks of a kernel, in words."""
    return [a.feature for name, a in _ASKING if a.asks(getattr(call, name))]


def kind_of(call: Arguments, row: str = "") -> Problem:
    """The problem that a call poses, without its sizes: what decides which backends serve it. `row`
    is the kernel that the call asks for."""
    bits = 0
    # The common call, of which a compiled function need not guard on the table: no bias, slopes or
    # sink, and no dropout, which has a seed.
    if not is_for_kernels(call.scale) or any(
        isinstance(value, Tensor) for value in call[_OPTIONAL:]
    ):
        for name, argument in _ASKING:
            if argument.bit and argument.asks(getattr(call, name)):
                bits |= argument.bit
    return Problem(
        dtype=DTYPE_NAMES[call.q.dtype],
        head_dim=specialized(call.q.shape[-1]),
        head_dim_v=specialized(call.v.shape[-1]),
        window_left=0 if holds(call.window_left >= 0) else -1,
        window_right=0 if holds(call.window_right >= 0) else -1,
        softcap=1.0 if holds(call.softcap > 0) else 0.0,
        features=bits,
        row=row,
        device=call.q.device,
    )


def problem_of(call: Arguments) -> Problem:
    """The problem that a call poses."""
    batch, seqlen_q, seqlen_k = call.sizes()
    if call.cu_seqlens_q is not None:  # the core takes no more than there are rows for the longest
        seqlen_q = min(seqlen_q, call.q.shape[0])
    if call.cu_seqlens_k is not None:
        seqlen_k = min(seqlen_k, call.k.shape[0])
    return kind_of(call)._replace(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=call.q.shape[-2],
        heads_kv=call.k.shape[-2],
        window_left=call.window_left,
        window_right=call.window_right,
        softcap=float(call.softcap),
        total_q=-1 if call.cu_seqlens_q is None else call.q.shape[0],
    )
