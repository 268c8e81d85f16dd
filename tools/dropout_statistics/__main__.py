"""Tests the bits of dropout as random numbers, and prints a Markdown table.

python tools/dropout_statistics [--quick] [--source NAME ...] [--device cuda] [--json FILE]
python tools/dropout_statistics --differences

A cell is the smallest p-value of a test over the orders in which the bytes were read, corrected for
their number: far below 10^-4 means that the bits are not random. docs/dropout.md has the results.
"""

from __future__ import annotations

import argparse
import json
import time

import pvalues
import torch
from examine import MIXER_OF, QUICK, SOURCES, Results, Sizes, examine
from progressions import differences_table


def cell(p: dict[str, float] | None) -> str:
    if p is None:
        return "-"
    least = pvalues.smallest(list(p.values()))
    failed = [key for key, value in p.items() if value < 1e-6]
    where = " in all orders" if len(failed) == len(p) > 1 else " " + ", ".join(failed)
    return f"{least:.2g}" + (where if failed and len(p) > 1 else "")


def table(results: dict[str, Results]) -> str:
    names = list(results)
    tests = dict.fromkeys(test for name in names for test in results[name])
    lines = ["| test | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for test in tests:
        cells = [cell(results[name].get(test)) for name in names]
        lines.append(f"| {test.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="about 10^6 draws instead of 10^8")
    parser.add_argument("--source", action="append", choices=SOURCES, help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--heads", type=int, help="matrices of 1024 x 8192 scores, instead of 2")
    parser.add_argument(
        "--differences", action="store_true", help="only compares mixers at chosen differences"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="also writes every p-value to this file")
    arguments = parser.parse_args()
    torch.set_default_device(arguments.device)
    if arguments.differences:
        print(differences_table(MIXER_OF))
        return
    sizes = QUICK if arguments.quick else Sizes(heads=arguments.heads or 2)
    results = {}
    for name in arguments.source or SOURCES:
        start = time.perf_counter()
        results[name] = examine(name, arguments.seed, sizes)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(table(results))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
