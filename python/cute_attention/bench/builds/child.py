"""The program of a process in which a build of this package makes calls.

It is run by its path, so that the build may be one that does not have this file, and takes from the
build's package what makes inputs, calls a contender and takes the time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
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
        self._inputs: dict[str, Any] = {}  # of the point in hand

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

        contender, shape, key = CONTENDERS[name], point_from_dict(point), repr(point)
        if key not in self._inputs:
            self.forget()
            self._inputs[key] = make_inputs(shape, self.device, seed=self._seed)
        with measuring(contender, shape):
            call = contender.build(shape, self._inputs[key])
            step = make_step(call, direction, self._inputs[key])
        return step, lambda: measuring(contender, shape)

    def forget(self) -> None:
        """Gives the memory of the point in hand back."""
        from cute_attention.bench.steps import free_memory

        self._inputs = {}
        free_memory()


class Server:
    """What `process.py` asks for: the name of a method and its arguments. The answer is a value and
    a reason, one of them empty."""

    def __init__(self) -> None:
        self._steps: Steps | None = None
        self._samples: dict[tuple[str, str, str], Callable[[], list[float]]] = {}

    def begin(self, device: str, seed: int) -> None:
        """Says where calls are made, and with which seed inputs are drawn."""
        self._steps = Steps(device, seed)

    @property
    def steps(self) -> Steps:
        assert self._steps, "`begin` comes first"
        return self._steps

    def cannot_run(self, name: str, point: dict[str, Any], direction: str) -> str:
        return self.steps.cannot_run(name, point, direction)

    def prepare(self, name: str, point: dict[str, Any], direction: str, time_ms: float) -> Any:
        """Warms a step up and returns a part of its result (`sampled`)."""
        from cute_attention.timing import make_timer

        step, scope = self.steps.make(name, point, direction)
        with scope():
            result = sampled(step())
            timer = make_timer(self.steps.device, time_ms)
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
        self._samples = {}
        self.steps.forget()

    def serve(self, connection: Connection) -> None:
        """Answers until the other side closes the connection."""
        import cute_attention
        from cute_attention.bench.steps import attempt

        connection.send(cute_attention.__file__)
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            connection.send(attempt(getattr(self, method), *arguments))


def run_once(file: Path) -> None:
    """Makes each call that a file asks for once, where a profiler looks on, and writes into the
    file why some were not made. A kernel of PyTorch stands before each call that was.

    The file has {"device", "seed", "cases": [[contender, point, direction]]}, and later a list of
    reasons, "" for each case that ran.
    """
    import torch

    from cute_attention.bench.steps import attempt

    asked = json.loads(file.read_text())
    steps = Steps(asked["device"], asked["seed"])
    reasons = []

    def run(name: str, point: dict[str, Any], direction: str) -> None:
        step, scope = steps.make(name, point, direction)
        with scope():
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            step()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()

    for case in asked["cases"]:
        reason = steps.cannot_run(*case) or attempt(run, *case)[1]
        reasons.append(reason)
    file.write_text(json.dumps(reasons))


def main(arguments: Sequence[str]) -> None:
    """Runs with a package.

    Args:
        arguments: the folder that the package is in, or "" for the one that is installed; then
            `serve` and the descriptor of a connection, or `once` and the file of `run_once`.
    """
    folder, what, where = arguments
    if folder:
        sys.path[0] = folder
        # An editable install finds modules of its package before sys.path is searched.
        sys.meta_path[:] = [
            finder for finder in sys.meta_path if "editable" not in type(finder).__module__
        ]
    else:
        del sys.path[0]  # the folder of this file
    if what == "serve":
        Server().serve(Connection(int(where)))
    else:
        run_once(Path(where))


if __name__ == "__main__":
    main(sys.argv[1:])
