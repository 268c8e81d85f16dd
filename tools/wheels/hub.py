"""Writes the folder of a Hugging Face kernel repository from the wheels of a release.

`build/<variant>/` is the package itself, with the libraries that it needs in `lib/`, and a
`metadata.json`. One variant has the kernels, for a torch with CUDA; the other serves the
rest.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

from project import RELEASE_ARCHS, ROOT, metadata

PACKAGE = "cute_attention"
STABLE_ABI = "210"  # the oldest torch whose stable ABI the binding uses
CUDA = "130"  # of the CUDA runtime in the kernel libraries: a driver for 13.0 or newer is needed
# What the Hub's loader compares with the GPU; the PTX of the sm80 library serves newer chips.
ARCHS = ["8.0+PTX", "8.6", "8.9", "9.0", "9.0a"]
CARD = """---
library_name: kernels
license: bsd-3-clause
tags:
- kernels
---

# cute-attention

Exact attention, forward and backward, for PyTorch on NVIDIA GPUs.

```python
from kernels import get_kernel

cute_attention = get_kernel("OWNER/cute-attention", version=1)
out = cute_attention.attention(q, k, v, causal=True)  # [batch, seqlen, heads, head_dim]
```
"""


def write_repository(wheels: Path, folder: Path) -> Path:
    """The repository's folder, from the wheels in `wheels`; a family without one is left out."""
    project = metadata()
    shutil.rmtree(folder, ignore_errors=True)
    kernels = [
        wheel for family in RELEASE_ARCHS for wheel in _wheels(wheels, f"{PACKAGE}_{family}")
    ]
    _write_variant(folder, f"cu{CUDA}", "cuda", project, wheels, kernels)
    _write_variant(folder, "cpu", "cpu", project, wheels, [])
    (folder / "README.md").write_text(CARD)
    shutil.copy(ROOT / "LICENSE", folder)
    return folder


def _wheels(folder: Path, distribution: str) -> list[Path]:
    return sorted(folder.glob(f"{distribution}-{metadata()['version']}-*.whl"))


def _write_variant(
    folder: Path,
    suffix: str,
    backend: str,
    project: dict[str, Any],
    wheels: Path,
    kernels: list[Path],
) -> None:
    core = _wheels(wheels, PACKAGE)
    if len(core) != 1:
        raise SystemExit(f"hub: {wheels} has {len(core)} wheels of {PACKAGE}, expected 1")
    variant = folder / "build" / f"torch-stable-abi{STABLE_ABI}-{suffix}-x86_64-linux"
    _unpack(core[0], f"{PACKAGE}/", variant)
    for wheel in kernels:
        _unpack(wheel, f"{wheel.name.split('-')[0]}/", variant / "lib")
    about: dict[str, Any] = {"type": backend}
    if backend == "cuda":
        about["archs"] = ARCHS
    (variant / "metadata.json").write_text(
        json.dumps(
            {
                "id": f"{PACKAGE}_{backend}_{project['version'].replace('.', '_')}",
                "name": project["name"],
                "version": 1,
                "license": project["license"],
                "python-depends": [],
                "backend": about,
            },
            indent=2,
        )
    )


def _unpack(wheel: Path, prefix: str, folder: Path) -> None:
    """The files of a wheel below `prefix`, into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(prefix) and not name.endswith("/"):
                path = folder / name.removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))
