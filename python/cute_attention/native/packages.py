"""The distributions that bring kernels: one for each family, with a kernel library and no code."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

_DISTRIBUTION = "cute-attention"
FAMILIES = ("sm80", "sm90")
_LOWEST_CAPABILITY = 80  # major * 10 + minor
_NATIVE_CAPABILITY = {90: "sm90"}  # whose machine code runs on no other


def kernel_folders() -> list[str]:
    """The folders of the installed kernel distributions; nothing of them is imported."""
    folders: list[str] = []
    for family in FAMILIES:
        spec = find_spec(f"cute_attention_{family}")
        if spec is not None:
            folders += spec.submodule_search_locations or ()
    return folders


def families_for(capability: int) -> tuple[str, ...]:
    """The families with kernels for a GPU of a compute capability, the fastest first."""
    if capability < _LOWEST_CAPABILITY:
        return ()
    native = _NATIVE_CAPABILITY.get(capability)
    return (native, "sm80") if native else ("sm80",)


def install_command(family: str) -> str:
    """What installs the kernels of a family, in the version of this package."""
    try:
        version = f"=={metadata.version(_DISTRIBUTION)}"
    except metadata.PackageNotFoundError:  # imported from its sources
        version = ""
    return f'pip install "{_DISTRIBUTION}[{family}]{version}"'
