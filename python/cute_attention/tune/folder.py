"""The folder of a search: libraries, what they are (manifest.json), and what was found of them on
each GPU. A search goes on from there, and a machine without a compiler measures what another one
has compiled."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from ..bench.machine import Environment
from ..bench.results import (
    Row,
    point_from_dict,
    point_to_dict,
    read_json,
    write_json,
    write_whole,
)
from ..native import instance, toolchain
from ..native.rows import TableRow
from ..native.study import Study
from .plan import Entry, Search
from .subjects import Subject

SCHEMA = 1
MANIFEST = "manifest.json"
KIND = "tune"
BEGUN = "its trial did not end: it may hang or end the process"  # until the trial has ended


def sources_key() -> str:
    """A hash of the files that kernels are compiled from."""
    folder = instance.sources()
    texts = [(folder / "src" / name).read_text() for name in instance.SOURCES]
    state = hashlib.sha256(toolchain.hash_of_folder(folder / "include").encode())
    state.update("\0".join(texts).encode())
    return state.hexdigest()[:24]


@dataclasses.dataclass
class Folder:
    """A search in its folder."""

    path: Path
    arguments: list[str]  # of the command line that began it
    arch: str
    chips: tuple[int, ...]
    count: int  # of candidates that were looked for, for each row of the tables
    sources: str  # of `sources_key`
    searches: list[Search]

    @property
    def manifest(self) -> Path:
        return self.path / MANIFEST

    def save(self) -> None:
        """Writes the manifest."""
        write_whole(
            self.manifest,
            {
                "schema": SCHEMA,
                "arguments": self.arguments,
                "arch": self.arch,
                "chips": list(self.chips),
                "count": self.count,
                "sources": self.sources,
                "searches": [_search_to_dict(search) for search in self.searches],
            },
        )

    def adopt(self, entry: Entry, name: str, library: Path, seconds: float) -> Entry:
        """The entry with its library, copied into the folder."""
        file = f"libcute_attention_{name}.so"
        part = self.path / f"{file}.part"
        shutil.copyfile(library, part)
        part.replace(self.path / file)
        return dataclasses.replace(entry, name=name, file=file, seconds=seconds, error="")

    def has(self, entry: Entry) -> bool:
        """Whether the library of an entry is there."""
        return bool(entry.file) and (self.path / entry.file).is_file()

    def results_path(self, device: str) -> Path:
        """The file of figures that were measured on a GPU of this name."""
        return self.path / f"results_{_word(device)}.json"

    def results(self, device: str) -> list[Row]:
        """What was measured on a GPU of this name before."""
        path = self.results_path(device)
        return read_json(path).rows if path.is_file() else []

    def save_results(self, environment: Environment, rows: list[Row]) -> None:
        write_json(self.results_path(environment.device), KIND, environment, rows)

    def trials_path(self, device: str) -> Path:
        return self.path / f"trials_{_word(device)}.json"

    def trials(self, device: str) -> dict[str, str]:
        """What is wrong with each kernel that was tried on a GPU of this name; "" for nothing."""
        path = self.trials_path(device)
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def save_trial(self, device: str, name: str, fault: str) -> None:
        write_whole(self.trials_path(device), {**self.trials(device), name: fault})


def read(path: Path) -> Folder:
    """The search in a folder.

    Raises:
        ValueError: there is none, or it is not of this tool's.
    """
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{path} has no {MANIFEST}, expected a folder that `tune` has written")
    refused = f"{manifest} is no manifest of this tool (schema {SCHEMA})"
    try:
        data = json.loads(manifest.read_text())
    except ValueError as error:
        raise ValueError(f"{refused}: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(refused)
    try:
        return Folder(
            path,
            list(data["arguments"]),
            data["arch"],
            tuple(data["chips"]),
            data["count"],
            data["sources"],
            [_search_from_dict(each) for each in data["searches"]],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{refused}: {type(error).__name__} {error}") from error


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")


def _columns_from(data: dict[str, Any]) -> TableRow:
    """The row of which `dataclasses.asdict` made the data."""
    own = {"score_mods": tuple(data["score_mods"]), "study": Study(**data["study"])}
    return TableRow(**{**data, **own})


def _search_to_dict(search: Search) -> dict[str, Any]:
    return {
        "present": dataclasses.asdict(search.subject.present),
        "points": [point_to_dict(point) for point in search.subject.points],
        "entries": [dataclasses.asdict(entry) for entry in search.entries],
        "refused": [list(pair) for pair in search.refused],
        "considered": search.considered,
    }


def _search_from_dict(data: dict[str, Any]) -> Search:
    points = tuple(point_from_dict(point) for point in data["points"])
    entries = [
        Entry(**{**entry, "columns": _columns_from(entry["columns"])}) for entry in data["entries"]
    ]
    return Search(
        Subject(_columns_from(data["present"]), points),
        tuple(entries),
        tuple((name, reason) for name, reason in data["refused"]),
        data["considered"],
    )
