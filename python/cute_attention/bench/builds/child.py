"""The program of a process in which a build of this package makes calls.

It is run by its path, so that the build may be one that does not have this file, and takes from the
build's package what makes inputs, calls a contender and takes the time.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# So many elements of a tensor, from its first to its last, are compared between processes.
SAMPLED = 2**18


def sampled(result: object) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Evenly spaced elements of the tensors of a step's result. Their distance is odd, so that they
    are in all columns of a power of two."""
    tensors: Any = result if isinstance(result, tuple) else (result,)
    return [
        x.detach().flatten()[:: x.numel() // SAMPLED | 1].float().cpu().numpy() for x in tensors
    ]


class Steps:
    """Steps of contenders at points. Points are dictionaries (`results.point_to_dict`), since a
    build's `Point` may be another."""

    def __init__(self, device: str, seed: int) -> None:
        import torch

        self.device = torch.device(device)
        self._seed = seed
        self._point: dict[str, Any] | None = None  # whose inputs are kept
        self._inputs: Any = None

    def cannot_run(self, name: str, point: dict[str, Any], direction: str) -> str:
        """Why a contender is not even tried, or ""."""
        from cute_attention.bench.contenders import CONTENDERS
        from cute_attention.bench.results import point_from_dict
        from cute_attention.bench.steps import cannot_run

        return cannot_run(CONTENDERS[name], point_from_dict(point), direction, self.device)

    def make(
        self, name: str, point: dict[str, Any], direction: str
    ) -> tuple[Callable[[], object], Callable[[], Any]]:
        """A step, and the context in which it runs."""
        from cute_attention.bench.contenders import CONTENDERS
        from cute_attention.bench.inputs import make_inputs
        from cute_attention.bench.results import point_from_dict
        from cute_attention.bench.steps import make_step, measuring

        contender, shape = CONTENDERS[name], point_from_dict(point)
        if self._point != point:
            self.forget()
            self._inputs = make_inputs(shape, self.device, seed=self._seed)
            self._point = point
        with measuring(contender, shape):
            step = make_step(contender.build(shape, self._inputs), direction, self._inputs)
        return step, lambda: measuring(contender, shape)

    def forget(self) -> None:
        """Gives the memory of the point in hand back."""
        from cute_attention.bench.steps import free_memory

        self._point = self._inputs = None
        free_memory()


class Server:
    """What `process.py` asks for: the name of a method and its arguments. The answer is a value and
    a reason, one of them empty."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._samples: dict[tuple[str, str, str], Callable[[], list[float]]] = {}
        self.cannot_run = steps.cannot_run

    def prepare(self, name: str, point: dict[str, Any], direction: str, time_ms: float) -> Any:
        """Warms a step up and returns a part of its result (`sampled`)."""
        from cute_attention.timing import make_timer

        step, scope = self._steps.make(name, point, direction)
        with scope():
            result = sampled(step())
            timer = make_timer(self._steps.device, time_ms)
            plan = timer.plan(step)

        def sample() -> list[float]:
            with scope():
                return timer.sample(step, plan)

        self._samples[name, repr(point), direction] = sample
        return result

    def sample(self, name: str, point: dict[str, Any], direction: str) -> list[float]:
        """Milliseconds of each repeat of a step that is prepared."""
        return self._samples[name, repr(point), direction]()

    def forget(self) -> None:
        """Gives the memory of all steps back."""
        self._samples = {}
        self._steps.forget()

    def serve(self, connection: Connection) -> None:
        """Says that the process has started, then answers until the other side closes the
        connection."""
        from cute_attention.bench.steps import attempt

        connection.send(None)
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            connection.send(attempt(getattr(self, method), *arguments))


def count(file: Path, steps: Steps) -> None:
    """Makes each call that a file asks for once while a profiler looks on, and writes into the file
    why some were not made. A kernel of PyTorch (`torch.cuda._sleep`) stands before each, made or
    not, so that the kernels between belong to one call.

    The file has a list of [contender, point, direction], and later a list of reasons, "" for each
    call that was made.
    """
    import torch

    from cute_attention.bench.steps import attempt

    def make(name: str, point: dict[str, Any], direction: str) -> None:
        step, scope = steps.make(name, point, direction)
        with scope():
            for _ in range(2):  # compiles, allocates
                step()
            torch.cuda.synchronize()
            with profiled(torch):
                step()

    reasons = []
    for call in json.loads(file.read_text()):
        with profiled(torch):
            torch.cuda._sleep(1)
        reasons.append(steps.cannot_run(*call) or attempt(make, *call)[1])
    file.write_text(json.dumps(reasons))


@contextlib.contextmanager
def profiled(torch: Any) -> Iterator[None]:
    """The profiler sees the kernels that are launched here."""
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def use(folder: str) -> None:
    """Makes the package in a folder the one that is imported; "" is the one that is installed.

    Raises:
        SystemExit: another one is imported all the same.
    """
    del sys.path[0]  # the folder of this file
    if not folder:
        return
    sys.path.insert(0, folder)
    # An editable install finds modules of its package before sys.path is searched.
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if "editable" not in type(finder).__module__
    ]
    import cute_attention

    if Path(folder) not in Path(cute_attention.__file__).resolve().parents:
        raise SystemExit(f"{cute_attention.__file__} was imported, not the package in {folder}")


def main(arguments: Sequence[str]) -> None:
    """Runs with a package.

    Args:
        arguments: the folder of `use`, the device and the seed of `Steps`; then `serve` and the
            descriptor of a connection, or `count` and the file of `count`.
    """
    folder, device, seed, what, where = arguments
    use(folder)
    steps = Steps(device, int(seed))
    if what == "serve":
        Server(steps).serve(Connection(int(where)))
    else:
        count(Path(where), steps)


if __name__ == "__main__":
    main(sys.argv[1:])
