"""Which backend is asked for: by an argument, by `use_backend`, by the environment."""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..checks import type_name
from ..native import core
from .backends import BACKENDS

if TYPE_CHECKING:
    from types import TracebackType

ENVIRONMENT = "CUTE_ATTENTION_BACKEND"

# What `use_backend` asks for in this thread or task, and what it asked for outside of each `with`.
_asked: contextvars.ContextVar[Any] = contextvars.ContextVar("cute_attention_backend")
_outside: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "cute_attention_backends_outside", default=()
)


# The kernels that `rows.use` asks for in this thread or task: names, forward and backward.
_asked_rows: contextvars.ContextVar[Any] = contextvars.ContextVar("cute_attention_rows")
_outside_rows: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "cute_attention_rows_outside", default=()
)

# The Record of `explain_calls` (record.py) of this thread or task; None where nobody asks.
recorded: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "cute_attention_record", default=None
)


class _Asked:
    """Its attribute `backend` is what `use_backend` asks for now, or the object itself for nothing;
    `rows` is the same of `rows.use`.

    torch.compile can neither trace nor guard on a ContextVar, but it guards on the value of an
    attribute, and of a property whose getter is written in C it takes the value without tracing
    the getter. A guard then reads the variable in the thread or task that calls the compiled code.
    `ContextVar.get` is such a getter. It returns its argument where the variable is not set, and a
    property passes the object.
    """

    backend = property(_asked.get)
    rows = property(_asked_rows.get)


class _Traced:
    """What a `with use_backend` in compiled code asks for: plain attributes, the only ones that
    torch.compile can set. They are those of the process, but hold only while it traces, and where
    it leaves the compiled code for Python in the middle of the `with`."""

    def __init__(self) -> None:
        self.backend: str | None = None
        self.outside: tuple[str | None, ...] = ()


_context = _Asked()
_traced = _Traced()
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Stack = contextvars.ContextVar[tuple[Any, ...]]


def _leave(name: str, variable: contextvars.ContextVar[Any], outside: _Stack) -> None:
    """Has a variable ask for what it did outside of a `with`. A stack, and no token, says what that
    was: generators may leave theirs in another order than they entered them in."""
    if not outside.get():
        raise RuntimeError(f"{name}: left in another thread or task than it was entered in")
    *others, before = outside.get()
    variable.set(before)
    outside.set(tuple(others))


def _decorated(name: str, function: _Function, make: Callable[[], Any]) -> _Function:
    """A function or a coroutine function whose calls run inside of what `make` returns, made anew
    for each: torch.compile enters no context from outside.

    Raises:
        TypeError: a generator function, which would run outside.
    """
    called = (function, type(function).__call__)  # the second of an object of a class with one
    if any(map(inspect.isgeneratorfunction, called)) or any(
        map(inspect.isasyncgenfunction, called)
    ):
        label = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name}: {label} is a generator function, expected one that returns "
            f"(inside of a generator, write `with {name}(...)`)"
        )
    if any(map(inspect.iscoroutinefunction, called)):

        @functools.wraps(function)
        async def awaits(*args: Any, **options: Any) -> Any:
            with make():
                return await function(*args, **options)

        return awaits  # type: ignore[return-value]

    @functools.wraps(function)
    def calls(*args: Any, **options: Any) -> Any:
        with make():
            return function(*args, **options)

    return calls  # type: ignore[return-value]


class use_backend:
    """Forces a backend for the calls inside, as an argument would: a context manager, and a
    decorator of functions and of coroutine functions.

    The argument of a call wins over the innermost `use_backend`, that over the environment variable
    CUTE_ATTENTION_BACKEND. It holds for the current thread or asyncio task, and for tasks that are
    created inside; not for other threads, such as those of a pool or of `torch.nn.DataParallel`,
    which enter it themselves. What was asked for at the forward of a call also holds for its
    backward. A compiled function compiles again under another `use_backend`; it reads the
    environment while it compiles, and no more.

    Args:
        backend: "auto", "sm90", "sm80" or "reference".

    Raises:
        TypeError: `backend` is no string, or what is decorated is a generator function.
        ValueError: an unknown backend.

    Example:
        >>> import torch
        >>> from cute_attention import attention, use_backend
        >>> q = k = v = torch.randn(1, 16, 4, 64)
        >>> with use_backend("reference"):
        ...     out = attention(q, k, v)
        >>> @use_backend("reference")
        ... def double(x):
        ...     return 2 * attention(x, x, x)
        >>> double(q).shape
        torch.Size([1, 16, 4, 64])
    """

    def __init__(self, backend: str) -> None:
        check_name("use_backend", "backend", backend)
        self.backend = backend
        self.is_traced = False  # entered in compiled code, which enters none made outside of it

    def __enter__(self) -> use_backend:
        if torch.compiler.is_compiling():
            self.is_traced = True
            _traced.outside = (*_traced.outside, _traced.backend)
            _traced.backend = self.backend
        else:
            _outside.set((*_outside.get(), _context.backend))
            _asked.set(self.backend)
        return self

    def __exit__(
        self,
        exception: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_traced:
            _traced.backend = _traced.outside[-1]
            _traced.outside = _traced.outside[:-1]
            return
        _leave("use_backend", _asked, _outside)

    def __call__(self, function: _Function) -> _Function:
        backend = self.backend
        return _decorated("use_backend", function, lambda: use_backend(backend))


def requested_backend(argument: str) -> str:
    """The argument, else what `use_backend` asks for, else the environment; "auto" where none
    does."""
    if argument != "auto":
        return argument
    context = context_backend()
    return environment_backend() if context == "auto" else context


def rows_of(name: str, kernels: object) -> tuple[str, str]:
    """The names of the kernels, of a forward and of a backward one; "" where there is none.

    Raises:
        TypeError: not a kernel, nor several.
        ValueError: two of the same direction.
    """
    given = kernels if isinstance(kernels, (tuple, list)) else (kernels,)
    names = {"forward": "", "backward": ""}
    for kernel in given:
        if not isinstance(kernel, core.Kernel):
            raise TypeError(
                f"{name}: kernel is {type_name(kernel)}, expected one that rows.Row(...).build() "
                "or kernels() returns"
            )
        if names[kernel.direction]:
            raise ValueError(
                f"{name}: kernel has two {kernel.direction} kernels, {names[kernel.direction]} and "
                f"{kernel.name}, expected one of a direction"
            )
        names[kernel.direction] = kernel.name
    return names["forward"], names["backward"]


def requested_rows(name: str, argument: object) -> tuple[str, str]:
    """The kernels that the argument asks for, else those of `rows.use`."""
    if argument is not None:
        return rows_of(name, argument)
    rows = _context.rows
    return ("", "") if rows is _context else rows


class use:
    """Has the calls inside run exactly these kernels: a context manager, and a decorator of
    functions and of coroutine functions.

    A call that a kernel does not serve raises BackendError with the reasons, and so does one that
    also asks for a backend of another family. Where only a kernel of one direction is given, the
    other direction is chosen as always. The argument `kernel` of a call wins over the innermost
    `use`, which replaces the `use` around it. What was asked for at the forward of a call also
    holds for its backward. It holds for the current thread or asyncio task; enter it outside of
    compiled functions, which compile again under another `use`.

    Args:
        kernels: one of a direction, of `Row.build` or of `kernels()`.

    Raises:
        TypeError: not a kernel, or what is decorated is a generator function.
        ValueError: two kernels of the same direction.
        RuntimeError: entered while torch.compile traces.

    Example:
        >>> from cute_attention import rows
        >>> with rows.use():  # none: what is asked for outside does not hold inside
        ...     pass
    """

    def __init__(self, *kernels: core.Kernel) -> None:
        self.kernels = kernels
        self.rows = rows_of("rows.use", kernels)

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("rows.use: entered in compiled code, expected around its call")
        _outside_rows.set((*_outside_rows.get(), _context.rows))
        _asked_rows.set(self.rows)

    def __exit__(
        self,
        exception: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _leave("rows.use", _asked_rows, _outside_rows)

    def __call__(self, function: _Function) -> _Function:
        kernels = self.kernels
        return _decorated("rows.use", function, lambda: use(*kernels))


def context_backend() -> str:
    """What `use_backend` asks for; "auto" where it asks for nothing."""
    backend = _context.backend if _traced.backend is None else _traced.backend
    return "auto" if backend is _context else backend


def environment_backend() -> str:
    """What the environment asks for; "auto" where the variable is not set, or set to nothing.

    Raises:
        ValueError: there is no such backend.
    """
    backend = os.environ.get(ENVIRONMENT) or "auto"
    check_name("attention", ENVIRONMENT, backend)
    return backend


# torch.compile calls the function while tracing and keeps its answer. The mark is what
# torch.compiler.assume_constant_result sets, without its import of torch._dynamo (a second).
environment_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


# `os.environ` encodes a name and raises an exception inside where there is no such variable, which
# takes a microsecond of every call. Its own dictionary, of bytes, is what CPython looks into.
_variables: Any = getattr(os.environ, "_data", os.environ)
_VARIABLE = os.fsencode(ENVIRONMENT) if _variables is not os.environ else ENVIRONMENT


def asked_around() -> tuple[Any, ...]:
    """All that asks for a backend, a kernel or an explanation beside the arguments of a call, and
    what is loaded: equal where the same is asked for and serves."""
    return (
        _context.backend,
        _traced.backend,
        _variables.get(_VARIABLE),
        _context.rows,
        recorded.get(),
        core.generation,
    )


def check_name(name: str, label: str, backend: object) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"{name}: {label} is {type_name(backend)}, expected a str")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"{name}: {label} is {backend!r}, expected one of {('auto', *BACKENDS)}")
