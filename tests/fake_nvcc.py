"""Stands in for nvcc in tests: a program that logs its calls and does what FAKE_NVCC says.

FAKE_NVCC is one of

    text       write a few bytes in place of a library (also where the variable is not set)
    library    compile the generated files with the C++ compiler, for a launch class without CUDA
    slow       the same as text, after a program that takes FAKE_NVCC_SECONDS
    two        the same as text, once two of them run at the same time; an error after a minute
    fail       an error of the compiler
    kill       end by a signal, as where memory runs out
    nothing    report success and write no file

Like nvcc it refuses options that it does not know: of NVCC_APPEND_FLAGS, those with "unknown" in
them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CPP = Path(__file__).resolve().parent / "cpp"
BYTES = 1000  # of a library that is none


def log(words: list[str]) -> None:
    with open(os.environ["FAKE_NVCC_LOG"], "a") as file:  # one write: processes do not mix
        file.write(f"{os.getpid()} {' '.join(words)}\n")


def compile_library(words: list[str], output: str) -> int:
    """The real generated files, with the launch class and the device functions of tests/cpp."""
    include = [word for word in words if word.startswith(("-I", "-D"))]
    files = [word for word in words if word.endswith((".cu", ".cpp"))]
    ours = [str(CPP / "fake_device.cpp") if file.endswith("device.cu") else file for file in files]
    kernels = ("append_tokens.cu", "call_counters.cu", "combine_splits.cu")
    ours = [file for file in ours if not file.endswith(kernels)]
    flags = ("-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden")
    command = ["c++", *flags, f"-I{CPP}/fake_launch", *include, "-x", "c++", *ours, "-o", output]
    return subprocess.run(command).returncode


def main(words: list[str]) -> int:
    if words == ["--version"]:
        print(f"fake compilation tools, V{os.environ.get('FAKE_NVCC_VERSION', '13.0.1')}")
        return 0
    log(words)
    for word in os.environ.get("NVCC_APPEND_FLAGS", "").split():
        if "unknown" in word:
            print(f"nvcc fatal   : Unknown option '{word}'")
            return 1
    mode = os.environ.get("FAKE_NVCC", "text")
    output = words[words.index("-o") + 1]
    if mode == "library":
        return compile_library(words, output)
    Path(output).write_bytes(b"half a library")  # what an interrupted compiler leaves
    if mode == "fail":
        print("row.cu: note: compiling\nrow.cu(7): error: static assertion failed: too large")
        return 2
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "nothing":
        Path(output).unlink()
        return 0
    if mode == "slow":
        subprocess.run(["sleep", os.environ["FAKE_NVCC_SECONDS"]])
    if mode == "two" and not another_runs():
        print("no other compiler runs")
        return 3
    Path(output).write_bytes(b"\0" * BYTES)
    return 0


def another_runs() -> bool:
    """Whether another call is logged within a minute: it waits for this one, too."""
    for _ in range(600):
        if len(Path(os.environ["FAKE_NVCC_LOG"]).read_text().splitlines()) > 1:
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
