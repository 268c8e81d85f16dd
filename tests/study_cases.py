"""Rows for study that have, between them, every value of every column in every family that has it.
On a machine with nvcc

    PYTHONPATH=tests python tests/study_cases.py FOLDER [REGEX] [--chips 90]

builds those whose names match, about a minute each, and with a GPU

    CUTE_ATTENTION_BUILT=FOLDER pytest -m gpu tests/test_rows_gpu.py tests/test_study*gpu.py

checks them. Built on another machine, rows of sm80 need its chip: `--chips`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from cute_attention.native import kernel_cache
from cute_attention.native.study import COLUMNS, TABLES, Family, Value
from cute_attention.rows import Row

FAMILIES: dict[Family, str] = {
    ("sm80", "forward"): "sm80_fwd_bf16_d64",
    ("sm80", "backward"): "sm80_bwd_bf16_d64",
    ("sm90", "forward"): "sm90_fwd_bf16_d64",
    ("sm90", "backward"): "sm90_bwd_bf16_d64",
}
# What a column needs beside it.
NEEDS: dict[str, dict[str, int | str]] = {
    "grad_q_sums": {"tile_m": 128, "tile_n": 64, "warps": 12},
    "key_stages": {"grad_q": "late"},
}
# Of a column with many values: none, more than the tables' one, and whole operands.
SOME: dict[str, tuple[Value, ...]] = {"fragments_ahead": (0, 1, 3, 64)}
# Rows whose kernels are others: several warps with the same keys, two kernels for the gradients,
# latent attention.
OTHERS: tuple[tuple[str, dict[str, int | str]], ...] = (
    ("sm80_bwd_bf16_d128", {"fragments_ahead": 3}),
    ("sm80_bwd_bf16_d128", {"swizzle": 64}),
    ("sm90_bwd_bf16_d256", {"swizzle": 32}),
    ("sm90_fwd_bf16_d64x512_qv", {"swizzle": 64}),
    ("sm90_fwd_bf16_d64x512_qv", {"softmax": "exact"}),
)


def values(column: str, family: Family) -> tuple[Value, ...]:
    """Those of a family's kernels that are tried."""
    allowed = COLUMNS[column].kernels.get(family, ())
    return tuple(value for value in allowed if value in SOME.get(column, allowed))


def cases() -> Iterator[Row]:
    """The rows: each has one value that is not that of the tables, and what it needs beside it."""
    for family, name in FAMILIES.items():
        for column in COLUMNS:
            for value in values(column, family):
                if value != getattr(TABLES, column):
                    yield Row.of(name, **NEEDS.get(column, {}), **{column: value})
    for name, columns in OTHERS:
        yield Row.of(name, **columns)


def main() -> None:
    """Builds."""
    parser = argparse.ArgumentParser(description="Builds rows for study, for the tests on a GPU.")
    parser.add_argument("folder", type=Path, help="for CUTE_ATTENTION_BUILT")
    parser.add_argument("only", nargs="?", default="", metavar="REGEX", help="of the rows' names")
    parser.add_argument("--chips", type=int, nargs="+", help="of sm80 rows; default: those here")
    args = parser.parse_args()
    for row in cases():
        if re.search(args.only, row.name):
            kernel = row.build(chips=args.chips)
            print(kernel_cache.copy_of(kernel.name, args.folder))


if __name__ == "__main__":
    main()
