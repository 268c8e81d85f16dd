"""All tests of one source: which sizes, and in which orders the bytes are read."""

from __future__ import annotations

from dataclasses import dataclass

import battery
import matrices
import progressions
import torch
from sources import CHOSEN_STEPS, MIXERS, Source, ours, philox_bytes, with_mixer

from cute_attention.semantics.dropout import as_seed, mix

SOURCES: dict[str, Source] = {
    "ours": ours,
    "philox": philox_bytes,
    **{f"mixer: {name}": with_mixer(mixer) for name, mixer in MIXERS.items()},
    **{f"steps: {name}": source for name, source in CHOSEN_STEPS.items()},
}
MIXER_OF = {"ours": mix, **{f"mixer: {name}": mixer for name, mixer in MIXERS.items()}}
Results = dict[str, dict[str, float]]  # test -> order in which the bytes were read -> p-value


@dataclass(frozen=True)
class Sizes:
    heads: int = 2
    rows: int = 1024
    cols: int = 8192
    many: int = 512  # heads, or seeds, of thin matrices
    thin: tuple[int, int] = (16, 512)
    squares: int = 96  # heads of 1024 x 1024 scores
    progressions: int = 4  # heads


QUICK = Sizes(heads=1, rows=256, cols=2048, many=128, thin=(16, 128), squares=1, progressions=1)


def line_results(source: Source, seed: int, sizes: Sizes) -> Results:
    """The tests of bytes in a row, in seven orders."""
    one, thin = as_seed(seed, torch.get_default_device()), ((0, sizes.thin[0]), (0, sizes.thin[1]))
    scores = source(one, (0, sizes.heads), (0, sizes.rows), (0, sizes.cols))
    seeds = torch.cat([source(one + n, (0, 1), *thin) for n in range(sizes.many)])
    orders = {order.__name__: order(scores) for order in matrices.ORDERS}
    orders["heads"] = matrices.across(source(one, (0, sizes.many), *thin))
    orders["seeds"] = matrices.across(seeds)
    found: Results = {test.__name__: {} for test in battery.LINE_TESTS}
    for name, lines in orders.items():
        lines = lines.contiguous()
        for test in battery.LINE_TESTS:
            found[test.__name__][name] = test(lines)
    for test in matrices.MATRIX_TESTS:
        found[test.__name__] = {"matrices": test(scores)}
    return found


def square_results(source: Source, seed: int, sizes: Sizes) -> Results:
    """The rates and the rectangles, of many heads."""
    one = as_seed(seed, torch.get_default_device())
    counts = torch.zeros(256, dtype=torch.int64)
    z = []
    for head in range(sizes.squares):
        square = source(one, (head, head + 1), (0, 1024), (0, 1024))[0]
        counts += battery.histogram(square, 256)
        z.append([matrices.rectangles(square, k) for k in (26, 128)])
    return {
        "keep_rate": {"squares": matrices.keep_rate(counts)},
        "all_rectangles": {"squares": matrices.sum_and_largest(torch.tensor(z))},
    }


def examine(name: str, seed: int = 1, sizes: Sizes | None = None) -> Results:
    sizes = sizes or Sizes()
    found = line_results(SOURCES[name], seed, sizes) | square_results(SOURCES[name], seed, sizes)
    if name in MIXER_OF:
        found["near_returns"] = {
            f"{2 * classes} keys": progressions.near_returns(
                MIXER_OF[name], sizes.progressions, classes, seed
            )
            for classes in (1024, 8192)
        }
    return found
