"""The program of a build's process: it makes calls of the build's package, and times them.

It is run by its path, so that the build may be one that does not have this file. It is asked
through a connection (`process.py`): a request is the name of a method of `Child` and its arguments,
and the answer is a value and a reason, one of them empty.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
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


class Child:
    """What the process can be asked for. Points are dictionaries (`results.point_to_dict`), since a
    build's `Point` may be another."""

    def __init__(self) -> None:
        self._inputs: dict[str, Any] = {}  # of the point in hand
        self._steps: dict[tuple[str, str, str], Any] = {}  # by contender, point and direction

    def cannot_run(self, name: str, point: dict[str, Any], direction: str, device: str) -> str:
        """Why a contender is not even tried, or ""."""
        import torch

        from cute_attention.bench.contenders import CONTENDERS
        from cute_attention.bench.results import point_from_dict
        from cute_attention.bench.steps import cannot_run

        return cannot_run(CONTENDERS[name], point_from_dict(point), direction, torch.device(device))

    def prepare(
        self,
        name: str,
        point: dict[str, Any],
        direction: str,
        device: str,
        seed: int,
        time_ms: float,
    ) -> Any:
        """Warms a step up and returns a part of its result (`sampled`)."""
        import torch

        from cute_attention.bench.contenders import CONTENDERS
        from cute_attention.bench.inputs import make_inputs
        from cute_attention.bench.results import point_from_dict
        from cute_attention.bench.steps import make_step, measuring
        from cute_attention.timing import make_timer

        contender, shape, key = CONTENDERS[name], point_from_dict(point), repr(point)
        if key not in self._inputs:
            self._inputs[key] = make_inputs(shape, torch.device(device), seed=seed)
        inputs = self._inputs[key]
        with measuring(contender, shape):
            step = make_step(contender.build(shape, inputs), direction, inputs)
            result = sampled(step())
            timer = make_timer(torch.device(device), time_ms)
            plan = timer.plan(step)

        def sample() -> list[float]:
            with measuring(contender, shape):
                return timer.sample(step, plan)

        self._steps[name, key, direction] = sample
        return result

    def sample(self, name: str, point: dict[str, Any], direction: str) -> Any:
        """Milliseconds of each repeat of a step that is prepared."""
        return self._steps[name, repr(point), direction]()

    def forget(self) -> None:
        """Gives the memory of the point in hand back."""
        from cute_attention.bench.steps import free_memory

        self._steps, self._inputs = {}, {}
        free_memory()

    def serve(self, connection: Connection) -> None:
        """Answers until the other side closes the connection."""
        from cute_attention.bench.steps import attempt

        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            connection.send(attempt(getattr(self, method), *arguments))


def main(arguments: Sequence[str]) -> None:
    """Serves with a package.

    Args:
        arguments: the folder that the package is in, or "" for the one that is installed; and the
            descriptor of the connection.
    """
    folder, descriptor = arguments
    if folder:
        sys.path[0] = folder
        # An editable install finds modules of its package before sys.path is searched.
        sys.meta_path[:] = [
            finder for finder in sys.meta_path if "editable" not in type(finder).__module__
        ]
    else:
        del sys.path[0]  # the folder of this file
    import cute_attention

    connection = Connection(int(descriptor))
    connection.send(cute_attention.__file__)
    Child().serve(connection)


if __name__ == "__main__":
    main(sys.argv[1:])
