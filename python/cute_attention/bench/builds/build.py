"""Where a build of this package is, and how a process that runs in it is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import child

PACKAGE = "cute_attention"
KERNEL_PATH = "CUTE_ATTENTION_KERNEL_PATH"  # the folders with kernel libraries


@dataclass(frozen=True)
class Build:
    """A build, or this package itself where nothing is given."""

    label: str = ""  # what it is called in tables
    home: str = ""  # the folder with its package; "": it is this package
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ), compare=False)
    in_build: str = ""  # LABEL=FOLDER

    @classmethod
    def of(cls, label: str, folder: Path) -> Build:
        """The build in a folder. Either the package is in it, as `pip install --target` puts it
        there, or kernel libraries are: then the build is this package with these kernels.

        Raises:
            ValueError: the folder has neither.
        """
        folder = folder.resolve()
        environment = dict(os.environ)
        in_build = f"{label}={folder}"
        if (folder / PACKAGE / "__init__.py").is_file():
            environment.pop(KERNEL_PATH, None)  # it has kernels for this package
            return cls(label, str(folder), environment, in_build)
        if any(folder.glob("libcute_attention_*.so")):
            environment[KERNEL_PATH] = str(folder)
            return cls(label, "", environment, in_build)
        raise ValueError(
            f"--build {in_build}: expected a folder with the package {PACKAGE}, or with kernel "
            "libraries (libcute_attention_*.so)"
        )

    def command(self, device: torch.device, seed: int, what: str, where: str) -> Sequence[str]:
        """The command line of a process in which this build is the package; it is to have
        `environment`.

        Args:
            device: where calls are made.
            seed: with which inputs are drawn.
            what: "serve" or "count" (`child.main`).
            where: the descriptor or the file of that.
        """
        return sys.executable, child.__file__, self.home, str(device), str(seed), what, where


def builds_of(given: Sequence[tuple[str, Path]]) -> list[Build]:
    """The builds of `--build`, from their labels and folders.

    Raises:
        ValueError: a folder has no build, or two builds have one label.
    """
    labels = [label for label, _ in given]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"--build {label}: two builds have this label")
    return [Build.of(label, folder) for label, folder in given]
