"""Writes the wheel of a kernel library: the library and no code."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file, so that the same library makes the same wheel
CHIPS = {
    "sm80": "GPUs of compute capability 8.0 and newer",
    "sm90": "Hopper GPUs (compute capability 9.0)",
}


def write_kernel_wheel(
    library: Path, family: str, project: dict[str, Any], licenses: dict[str, bytes], folder: Path
) -> Path:
    """The wheel `cute-attention-<family>`, tagged for any Linux on x86_64.

    Args:
        library: `libcute_attention_<family>.so`, stripped or not.
        family: `sm80` or `sm90`.
        project: the table [project] of `cute-attention`, whose version both have.
        licenses: name and text of each licence.
        folder: where the wheel is written.
    """
    package = f"cute_attention_{family}"
    version = project["version"]
    info = f"{package}-{version}.dist-info"
    files = {
        f"{package}/libcute_attention_{family}.so": library.read_bytes(),
        f"{info}/METADATA": _metadata(family, project, licenses).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: cute-attention\n"
        b"Root-Is-Purelib: false\nTag: py3-none-linux_x86_64\n",
        **{f"{info}/licenses/{name}": text for name, text in licenses.items()},
    }
    record = [f"{name},{_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{package}-{version}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(entry, data)
    return path


def _metadata(family: str, project: dict[str, Any], licenses: dict[str, bytes]) -> str:
    name, version = project["name"], project["version"]
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}-{family}",
        f"Version: {version}",
        f"Summary: The kernels of {name} for {CHIPS[family]}",
        f"License-Expression: {project['license']}",
        *(f"License-File: {file}" for file in licenses),
        f"Requires-Python: {project['requires-python']}",
        f"Requires-Dist: {name}=={version}",
        "Description-Content-Type: text/markdown",
        "",
        f"Compiled kernels for `{name}`, which finds them where they lie:",
        f'`pip install "{name}[{family}]"`. Nothing of this is imported.',
        "",
    ]
    return "\n".join(lines)


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
