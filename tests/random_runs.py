"""Many random calls in several processes: `python tests/random_calls.py --help`."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from random_calls import GPU_WAYS, KINDS, ON_CPU, Limits, draw
from random_checks import Wrong, check


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Makes random calls of attention until the time is up."
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    parser.add_argument("--one", action="store_true", help="only the call of this seed")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--dtypes", default="bf16,fp16")
    parser.add_argument("--dims", default="8-256", help="the head dims, and 8 between them")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--scores", type=int, default=3_000_000, help="of a call, at most")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--emulated", action="store_true", help="kernels of the emulator, on the CPU"
    )
    parser.add_argument("--lines", type=int, default=25, help="of the digest")
    parser.add_argument("--log", help="a file for the line of every wrong call")
    args = parser.parse_args()
    if args.one:
        call = draw(args.seed, limits(args))
        print(call)
        with machine(args.emulated):
            print("right:", check(call, args.device, args.backend))
        return
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=work, args=(vars(args), number, queue), daemon=True)
        for number in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    report(args, gather(args, workers, queue))


def limits(args: Any) -> Limits:
    first, last = map(int, args.dims.split("-"))
    dims = tuple(range(first, last + 1, 8))
    kinds = tuple(args.kinds.split(","))
    is_gpu = args.device.startswith("cuda") and not args.emulated
    ways = ON_CPU + GPU_WAYS if is_gpu else ON_CPU
    if args.emulated:
        ways = tuple(way for way in ways if way != "compiled")
    poison = ("bias", "rows") if args.backend == "reference" else ("bias",)
    return Limits(args.scores, tuple(args.dtypes.split(",")), dims, kinds, ways, poison)


@contextlib.contextmanager
def machine(is_emulated: bool) -> Iterator[None]:
    """A GPU, or what passes for one (docs/emulator.md)."""
    if not is_emulated:
        yield
        return
    from emulated import CpuForCuda, emulated_cuda

    with emulated_cuda(), CpuForCuda():
        yield


def work(settings: dict[str, Any], number: int, queue: Any) -> None:
    """Calls number, number + workers, ... A first message says that the worker is there; then each
    call's rows and what was wrong."""
    args = argparse.Namespace(**settings)
    with machine(args.emulated):
        _work(args, number, queue)


def _work(args: Any, number: int, queue: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.zeros(1, device=args.device)
    end = time.monotonic() + args.seconds
    seed = args.seed + number
    while time.monotonic() < end:
        call = draw(seed, limits(args))
        rows: list[str] = []
        wrong = ""
        queue.put((number, "begun", seed))
        try:
            rows = check(call, args.device, args.backend)
        except Wrong as error:
            wrong, what = str(error), error.result
        except Exception as error:
            wrong, what = f"{type(error).__name__}: {str(error)[:300]}", type(error).__name__
        if wrong:
            rows = _rows_again(call, args)
            line = {"seed": seed, "what": what, "wrong": wrong, "call": str(call), "rows": rows,
                    "features": call.features}  # fmt: skip
            queue.put((number, "wrong", line))
            if "CUDA error" in wrong or "illegal" in wrong:  # nothing in this process works now
                break
        queue.put((number, "ended", rows))
        seed += args.workers
    queue.put((number, "done", None))


def _rows_again(call: Any, args: Any) -> list[str]:
    """The rows of a call that went wrong."""
    from random_checks import explained
    from random_tensors import make

    if call.kind == "cache":
        return ["cache"]
    try:
        return explained(make(call, args.device), args.backend)
    except Exception:
        return ["unknown"]


def gather(args: Any, workers: list[Any], queue: Any) -> dict[str, Any]:
    """All messages. A process that ends without its last one crashed in the call that it had begun;
    one that says nothing for long hangs in it."""
    begun: dict[int, int] = {}
    last = dict.fromkeys(range(len(workers)), time.monotonic() + 60)
    running = set(last)
    rows: collections.Counter[str] = collections.Counter()
    wrong: list[dict[str, Any]] = []
    calls = 0
    while running:
        try:
            number, what, value = queue.get(timeout=0.5)
        except Exception:
            for each in list(running):
                hangs = time.monotonic() > last[each] + 20
                if workers[each].is_alive() and not hangs:
                    continue
                running.discard(each)
                workers[each].kill()
                how = "hangs" if hangs else f"the process ended with {workers[each].exitcode}"
                seed = begun.get(each, -1)
                text = str(draw(seed, limits(args))) if seed >= 0 else "before its first call"
                wrong.append({"seed": seed, "what": "crash", "wrong": how, "call": text, "rows": [],
                              "features": how})  # fmt: skip
            continue
        last[number] = time.monotonic()
        if what == "begun":
            begun[number] = value
        elif what == "wrong":
            wrong.append(value)
        elif what == "ended":
            calls += 1
            rows.update(value)
        else:
            running.discard(number)
    return {"calls": calls, "rows": rows, "wrong": wrong}


def report(args: Any, found: dict[str, Any]) -> None:
    """Which rows were reached and how often, and of wrong calls the first of each group."""
    from cute_attention import kernels

    names = [kernel.name for kernel in kernels()]
    print(f"{found['calls']} calls, {len(found['wrong'])} wrong")
    print("rows:", ", ".join(f"{name} {many}" for name, many in found["rows"].most_common()))
    print("rows never reached:", ", ".join(sorted(set(names) - set(found["rows"]))) or "none")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in found["wrong"]:
        groups.setdefault((line["what"], " ".join(line["rows"])), []).append(line)
    fixed = f"--one --dtypes {args.dtypes} --dims {args.dims} --scores {args.scores}"
    fixed += f" --kinds {args.kinds} --device {args.device} --backend {args.backend}"
    fixed += " --emulated" * args.emulated
    for (what, rows), lines in sorted(groups.items(), key=lambda g: -len(g[1]))[: args.lines]:
        line = min(lines, key=lambda line: len(line["call"]))
        known = f"{line['wrong'][:160]} | {line['call'][:260]}"
        print(f"{len(lines)} x {what} [{rows}] e.g. --seed {line['seed']}: {known}")
    if found["wrong"]:
        print("each again: python tests/random_calls.py", fixed, "--seed N")
    if args.log:
        with open(args.log, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in found["wrong"])
