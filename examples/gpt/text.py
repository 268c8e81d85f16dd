"""Text as bytes: the package's own sources and documentation, or any files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import cute_attention

_FOLDERS = ("docs", "examples", "include", "python", "src", "tests")
_SUFFIXES = {".cpp", ".cu", ".def", ".h", ".md", ".py"}
_HELD_OUT = 10  # the last tenth of each file is held out


@dataclass(frozen=True)
class Text:
    train: Tensor  # uint8 [bytes]
    held_out: Tensor  # uint8 [bytes]
    origin: str  # in words

    def batches(self, batch: int, context: int, seed: int) -> Batches:
        return Batches(self.train, batch, context, seed)

    def held_out_batch(self, sequences: int, context: int) -> Tensor:
        """Always the same sequences, evenly spread, `[sequences, context + 1]`."""
        last = self.held_out.numel() - context - 1
        return _cut(self.held_out, torch.linspace(0, last, sequences).long(), context)


class Batches:
    """Sequences from random places, the same ones for the same seed, `[batch, context + 1]`."""

    def __init__(self, data: Tensor, batch: int, context: int, seed: int) -> None:
        self._data, self._batch, self._context = data, batch, context
        self._generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Tensor:
        places = self._data.numel() - self._context
        starts = torch.randint(places, (self._batch,), generator=self._generator)
        return _cut(self._data, starts, self._context)


def _cut(data: Tensor, starts: Tensor, context: int) -> Tensor:
    return data[starts[:, None] + torch.arange(context + 1)].long()


def own_files() -> list[Path]:
    """The sources and documentation of the checkout around this file, else of the package that is
    installed."""
    root = Path(__file__).resolve().parents[2]
    if (root / "python" / "cute_attention").is_dir():
        roots = [root / folder for folder in _FOLDERS]
        files = list(root.glob("*.md"))
    else:
        roots = [Path(path) for path in cute_attention.__path__]
        files = []
    for folder in roots:
        files += (path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
    return sorted(files)


def load_text(files: Sequence[Path], context: int) -> Text:
    """The bytes of `files`, or the package's own text where there are none.

    Raises:
        ValueError: where a file cannot be read, or they are too short for `context` together.
    """
    origin = f"{len(files)} of your files" if len(files) != 1 else files[0].name
    if not files:
        files = own_files()
        origin = f"the {len(files)} sources and documents of this package"
    train, held_out = bytearray(), bytearray()
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
        border = len(content) - len(content) // _HELD_OUT
        train += content[:border]
        held_out += content[border:]
    if len(held_out) <= context:
        needed = _HELD_OUT * (context + 1)
        raise ValueError(
            f"{len(train) + len(held_out):,} bytes of text are too few: a tenth is held out, and "
            f"that has to be longer than the context of {context}; give at least {needed:,} bytes"
        )
    return Text(_tensor(train), _tensor(held_out), origin)


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
