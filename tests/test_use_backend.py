"""`use_backend` and `rows.use`: threads, asyncio tasks, generators, decorators, compiled code."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import BackendError, attention, rows, use_backend
from cute_attention.dispatch.request import requested_backend, requested_rows
from cute_attention.native import core


def asked() -> str:
    return requested_backend("auto")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert asked() == "auto"


def test_threads_that_leave_in_another_order() -> None:
    """Each of two threads sees its own backend, and none stays in force. The thread that enters
    first also leaves first."""
    entered, left = threading.Barrier(3), threading.Event()
    seen: dict[str, list[str]] = {"sm80": [], "sm90": []}

    def run(backend: str) -> None:
        with use_backend(backend):
            entered.wait()
            seen[backend].append(asked())
            if backend == "sm90":
                left.wait()
                seen[backend].append(asked())
        seen[backend].append(asked())

    threads = {name: threading.Thread(target=run, args=(name,)) for name in seen}
    threads["sm80"].start()
    threads["sm90"].start()
    entered.wait()
    assert asked() == "auto"
    threads["sm80"].join()
    left.set()
    threads["sm90"].join()
    assert seen == {"sm80": ["sm80", "auto"], "sm90": ["sm90", "sm90", "auto"]}


def test_tasks_that_leave_in_another_order() -> None:
    async def main() -> list[list[str]]:
        second_entered, first_left = asyncio.Event(), asyncio.Event()

        async def first() -> list[str]:
            with use_backend("sm80"):
                await second_entered.wait()
                seen = [asked(), *await asyncio.create_task(child())]
            first_left.set()
            return [*seen, asked()]

        async def second() -> list[str]:
            with use_backend("sm90"):
                second_entered.set()
                await first_left.wait()
                seen = [asked()]
            return [*seen, asked()]

        async def child() -> list[str]:
            return [asked()]

        return [*await asyncio.gather(first(), second()), [asked()]]

    assert asyncio.run(main()) == [["sm80", "sm80", "auto"], ["sm90", "auto"], ["auto"]]


def test_generators_that_end_in_another_order() -> None:
    def generator(backend: str) -> Iterator[None]:
        with use_backend(backend):
            yield

    first, second = generator("sm80"), generator("sm90")
    next(first), next(second)
    first.close()
    second.close()
    assert asked() == "auto"


def test_one_context_in_many_threads() -> None:
    """One context is entered again and again, and in eight threads at once."""
    context = use_backend("sm80")

    def run(index: int) -> list[str]:
        seen = []
        for _ in range(200):
            with context:
                seen.append(asked())
                with use_backend("sm90"), context:
                    seen.append(asked())
            seen.append(asked())
        return seen

    with ThreadPoolExecutor(8) as pool:
        for seen in pool.map(run, range(8)):
            assert seen == ["sm80", "sm80", "auto"] * 200


def test_leaving_where_it_was_not_entered() -> None:
    context = use_backend("sm80")
    with context, ThreadPoolExecutor(1) as pool:
        assert pool.submit(asked).result() == "auto"
        with pytest.raises(RuntimeError, match="left in another thread or task than it was ent"):
            pool.submit(context.__exit__, None, None, None).result()
        assert asked() == "sm80"


def test_decorator() -> None:
    @use_backend("sm80")
    def inner(depth: int, *, name: str = "x") -> tuple[str, ...]:
        """Documented."""
        return (asked(), *(inner(depth - 1) if depth else ()))

    @use_backend("sm90")
    def outer() -> list[Any]:
        return [asked(), inner(1), asked()]

    assert outer() == ["sm90", ("sm80", "sm80"), "sm90"]
    assert (inner.__name__, inner.__doc__) == ("inner", "Documented.")
    assert list(inspect.signature(inner).parameters) == ["depth", "name"]

    @use_backend("sm80")
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    q = torch.ones(1, 2, 1, 8)
    with pytest.raises(BackendError, match="'sm80' cannot serve"):
        use_backend("sm80")(attention)(q, q, q)


def test_decorated_coroutine_function() -> None:
    @use_backend("sm80")
    async def run() -> list[str]:
        seen = [asked()]
        await asyncio.sleep(0)
        return [*seen, asked()]

    async def main() -> list[Any]:
        return [await run(), asked()]

    assert inspect.iscoroutinefunction(run)
    assert asyncio.run(main()) == [["sm80", "sm80"], "auto"]


def test_generator_functions_are_not_decorated() -> None:
    def generator() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"use_backend: .*generator is a generator function, expe"):
        use_backend("sm80")(generator)
    with pytest.raises(TypeError, match=r"use_backend: functools.partial\(.* is a generator funct"):
        use_backend("sm80")(functools.partial(generator))


def test_decorated_objects_that_are_called() -> None:
    """What their class says of a call, a coroutine or a generator, holds for them, too."""

    class Handler:
        async def __call__(self) -> str:
            await asyncio.sleep(0)
            return asked()

    class Generator:
        def __call__(self) -> Iterator[int]:
            yield 1

    assert asyncio.run(use_backend("sm80")(Handler())()) == "sm80"
    with pytest.raises(
        TypeError, match=r"Generator object at .* is a generator function, expected"
    ):
        use_backend("sm80")(Generator())


def kernel(name: str) -> core.Kernel:
    tiles = dict.fromkeys(("tile_m", "tile_n", "stages", "warps", "threads"), 1)
    return core.Kernel(
        name=name,
        arch="sm90",
        direction="forward",
        dtype="bf16",
        head_dim=64,
        head_dim_v=64,
        score_mods=(),
        shared_memory_bytes=0,
        features=(),
        on_request=True,
        **tiles,
    )


def asked_row() -> str:
    return requested_rows("attention", None)[0]


def test_rows_that_generators_ask_for_in_another_order() -> None:
    def generator(name: str) -> Iterator[None]:
        with rows.use(kernel(name)):
            yield

    first, second = generator("one"), generator("other")
    next(first), next(second)
    first.close()
    assert asked_row() == "one"  # as of use_backend: the innermost is left, whichever ends
    second.close()
    assert asked_row() == ""


def test_rows_of_decorated_functions() -> None:
    """A coroutine function and a generator function run when the decorator has returned."""

    @rows.use(kernel("one"))
    async def run() -> list[str]:
        seen = [asked_row()]
        await asyncio.sleep(0)
        return [*seen, asked_row()]

    async def main() -> list[Any]:
        return [await run(), asked_row()]

    assert inspect.iscoroutinefunction(run)
    assert asyncio.run(main()) == [["one", "one"], ""]

    def generator() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"rows\.use: .*generator is a generator function, expec"):
        rows.use(kernel("one"))(generator)


class Graphs:
    """A compiler that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return module.forward


@pytest.fixture
def graphs() -> Graphs:
    torch._dynamo.reset()
    return Graphs()


def choice(x: Tensor) -> Tensor:
    """`x` plus a number that stands for the backend that is asked for."""
    return x + ("auto", "sm90", "sm80", "reference").index(asked())


def test_compiled_code_guards_in_every_thread_and_task(graphs: Graphs) -> None:
    """The function is compiled once for each backend, and every call takes the right graph."""
    compiled = torch.compile(choice, fullgraph=True, backend=graphs)
    zero = torch.zeros(())
    assert compiled(zero) == 0

    def run(backend: str) -> float:
        with use_backend(backend):
            return compiled(zero).item()

    assert [run("sm80"), compiled(zero).item(), run("reference")] == [2, 0, 3]
    assert graphs.count == 3
    with ThreadPoolExecutor(1) as pool, use_backend("sm80"):
        assert [pool.submit(run, "reference").result(), compiled(zero).item()] == [3, 2]
        assert pool.submit(compiled, zero).result() == 0

    async def task(backend: str) -> float:
        with use_backend(backend):
            await asyncio.sleep(0)
            return compiled(zero).item()

    async def main() -> list[float]:
        return list(await asyncio.gather(task("sm80"), task("reference")))

    assert asyncio.run(main()) == [2, 3]
    assert graphs.count == 3


def test_compiled_code_that_enters_it(graphs: Graphs) -> None:
    """A backend is asked for by `with`, also nested, and by a decorator. Calls after that see what
    was asked for outside."""

    @use_backend("reference")
    def decorated(x: Tensor) -> Tensor:
        return choice(x)

    @torch.compile(fullgraph=True, backend=graphs)
    def run(x: Tensor) -> list[Tensor]:
        with use_backend("sm90"):
            first = choice(x)
            with use_backend("auto"):
                second = choice(x)
            third = choice(x)
        return [first, second, third, decorated(x), choice(x)]

    zero = torch.zeros(())
    for _ in range(2):
        assert [value.item() for value in run(zero)] == [1, 0, 1, 3, 0]
    assert graphs.count == 1
    with use_backend("sm80"):
        assert [value.item() for value in run(zero)] == [1, 0, 1, 3, 2]
    compiled = torch.compile(decorated, fullgraph=True, backend=graphs)
    assert compiled(zero) == 3
    assert use_backend("sm80")(torch.compile(choice, fullgraph=True, backend=graphs))(zero) == 2


def test_a_graph_break_inside(graphs: Graphs) -> None:
    """Python code that runs in the middle of compiled code sees the backend that this code asks
    for."""
    seen = []

    @torch._dynamo.disable
    def uncompiled() -> None:
        seen.append(asked())

    @torch.compile(backend=graphs)
    def run(x: Tensor) -> Tensor:
        with use_backend("reference"):
            x = choice(x)
            uncompiled()
            return choice(x)

    for _ in range(2):
        assert run(torch.zeros(())) == 6
    assert seen == ["reference", "reference"]
