"""The plugin that runs tests in the emulator says so where it has no kernels to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_attention.native import binding, core
from emulated import EMULATOR, check_libraries

FOLDER = Path("/kernels")


def library(name: str, rows: int, error: str = "") -> core.LibraryInfo:
    return core.LibraryInfo(str(FOLDER / name), name, "", rows, error)


@pytest.mark.parametrize(
    ("found", "unbound", "reason"),
    [
        ([], "", "/kernels has no kernel library that is served"),
        ([library("one.so", 0, "kernel ABI 12, expected 13")], "",
         "/kernels/one.so: kernel ABI 12, expected 13; /kernels has no kernel library"),
        ([library("one.so", 3), library("two.so", 0, "kernel ABI 12")], "",
         "/kernels/two.so: kernel ABI 12"),
        ([library("one.so", 3)], "it does not load",
         "/kernels/libcute_attention_torch.so: it does not load"),
    ],
)  # fmt: skip
def test_libraries_that_would_not_run_are_named(
    found: list[core.LibraryInfo], unbound: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = core.LibraryInfo("/elsewhere/other.so", "other", "", 0, "of another version")
    monkeypatch.setattr(core, "libraries", lambda: [elsewhere, *found])
    monkeypatch.setattr(binding, "binding_error", lambda: unbound)
    with pytest.raises(RuntimeError, match="the emulator cannot run its libraries: ") as error:
        check_libraries(FOLDER)
    assert reason in str(error.value) and "other.so" not in str(error.value)


def test_libraries_that_run_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = library(EMULATOR, 0, "it does not export cute_attention_kernel_library")
    monkeypatch.setattr(core, "libraries", lambda: [beside, library("one.so", 3)])
    monkeypatch.setattr(binding, "binding_error", lambda: "")
    check_libraries(FOLDER)
