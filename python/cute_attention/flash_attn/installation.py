"""Our modules in the place of flash-attn's and FlashAttention-3's, for code that imports these."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.metadata import DistributionFinder
from types import ModuleType
from typing import Any

from ..integrations.flash_attn_interface.ops import register as register_operators
from .version import VERSION

# Upstream's names of modules; ours are named the same within the package.
_SERVED = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.bert_padding",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn_interface",
)
_PACKAGE = __name__.rpartition(".flash_attn.")[0]  # the Hugging Face Hub names the package itself
# Distributions of which importlib.metadata tells a version, by names in its normal form.
_DISTRIBUTIONS = {"flash-attn": VERSION}
_OURS = "cute_attention"


def install() -> None:
    """Puts `cute_attention.flash_attn` and `cute_attention.flash_attn_interface` into `sys.modules`
    under flash-attn's names, for the whole process: whatever imports `flash_attn` or
    `flash_attn_interface` from then on gets ours, also where the real ones are installed.

    `importlib.util.find_spec` finds them, and `importlib.metadata.version("flash-attn")` is the
    version that is served here, since libraries ask for it before they import.
    `torch.ops.flash_attn_3` has the operators of FlashAttention-3. Other modules of
    flash-attn (`flash_attn.ops`, `flash_attn.losses` and so on) do not exist after it. Calling it
    again changes nothing.

    Raises:
        RuntimeError: the real flash_attn or flash_attn_interface is imported already, or its
            operators are registered: who imported it would keep it.

    Example:
        >>> import cute_attention.flash_attn
        >>> cute_attention.flash_attn.install()
        >>> from flash_attn import flash_attn_func
        >>> flash_attn_func.__module__
        'cute_attention.integrations.flash_attn.dense'
    """
    for name in _SERVED:
        present = sys.modules.get(name)
        if present is not None and not _is_ours(present):
            raise RuntimeError(
                f"install: {name} is imported already, from "
                f"{getattr(present, '__file__', None)}, expected install() before anything imports "
                "it"
            )
    register_operators()
    for name in _SERVED:
        if name not in sys.modules:
            sys.modules[name] = _module(name, importlib.import_module(f"{_PACKAGE}.{name}"))
    for name, module in list(sys.modules.items()):
        parent, _, child = name.rpartition(".")
        if name in _SERVED and parent:
            setattr(sys.modules[parent], child, module)
    if not any(isinstance(finder, _Distributions) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Distributions())
    importlib.invalidate_caches()


def _is_ours(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.loader_state == _OURS


def _module(name: str, source: ModuleType) -> ModuleType:
    """A module of that name with the contents of `source`, and a spec of its own."""
    module = ModuleType(name, source.__doc__)
    is_package = any(other.startswith(f"{name}.") for other in _SERVED)
    spec = ModuleSpec(name, None, origin=source.__file__, loader_state=_OURS, is_package=is_package)
    kept = {key: value for key, value in vars(source).items() if not _is_machinery(key)}
    vars(module).update(kept)
    module.__spec__ = spec
    module.__package__ = name if is_package else name.rpartition(".")[0]
    module.__file__ = source.__file__
    if is_package:
        module.__path__ = []
    return module


def _is_machinery(key: str) -> bool:
    """Whether a module's attribute is its own, and not part of what it offers."""
    return key.startswith("__") and key not in ("__all__", "__version__")


class _Distribution(metadata.Distribution):
    """The metadata of a package that is not installed: its name and version, and of which modules
    it is, by which libraries tell packages with modules of the same name apart."""

    def __init__(self, name: str, version: str) -> None:
        modules = [module for module in _SERVED if "." not in module]
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": "\n".join(modules),
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class _Distributions(DistributionFinder):
    """Finds the distributions of `_DISTRIBUTIONS`, and no modules."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[metadata.Distribution]:
        return self._found(context.name)

    def _found(self, wanted: str | None) -> Iterator[metadata.Distribution]:
        for name, version in _DISTRIBUTIONS.items():
            if wanted is None or wanted.lower().replace("_", "-") == name:
                yield _Distribution(name, version)
