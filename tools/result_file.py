"""Reads the result file of a command of `bench` for the page that a tool writes of it."""

from __future__ import annotations

from pathlib import Path

from cute_attention.bench.results import Row, read_json


def read(file: Path, kind: str) -> tuple[list[Row], str]:
    """Its rows, and the device on which they were measured."""
    results = read_json(file)
    if results.kind != kind:
        raise SystemExit(f"{file} is a file of {results.kind}, expected one of {kind}")
    return results.rows, results.environment["device"]
