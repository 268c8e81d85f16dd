"""Samples a small GPT with a paged KV cache: prompts of different lengths that share a prefix."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in train_gpt.py

try:
    import train_gpt
    from gpt.sampling import printable
    from gpt.serving import Texts, largest_gap, write_padded, write_paged
    from gpt.text import Text, load_text
    from gpt.training import DTYPES, Recipe, Run, train

    from cute_attention import BackendError, attention, use_backend
except ModuleNotFoundError as error:
    sys.exit(f"{error}: run `make demo`, or `pip install '.[demo]'` first")

DESCRIPTION = """\
Trains the small GPT of train_gpt.py for a short while, then continues several prompts at once, the
most likely byte each time. The prompts begin with the same prefix, which is read once: their
sequences share its pages. Shows the texts and how fast they were written, beside PyTorch's own
attention with a padded cache, and whether each byte is what the model finds without a cache.
"""

EPILOG = """\
exit code: 0 if the texts are those without a cache, 1 if not, 2 for wrong arguments.

examples:
  python examples/generate.py                              a minute on two CPU cores
  python examples/generate.py --prompt "def " --prompt "class " --prefix "import torch\\n"
  python examples/generate.py --steps 400 --length 200 --device cuda
"""

# How far a byte's logit may lie below the largest one, by rounding alone: two ways to add up the
# same products order two bytes differently only where their logits are as near as that.
TOLERANCES = {"fp32": 1e-3, "bf16": 0.2}
PREFIX = '"""Tests."""\n\nfrom __future__ import annotations\n\n'
PROMPTS = ("import ", "def ", "class Row:\n    ", "@pytest.mark", "x")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, help="text; default: the package's own")
    parser.add_argument("--prefix", default=PREFIX, help="of all prompts; default: %(default)r")
    parser.add_argument(
        "--prompt", dest="prompts", action="append", help="several times; default: five of its own"
    )
    parser.add_argument(
        "--length", type=int, default=48, metavar="N", help="bytes to write; default: %(default)s"
    )
    parser.add_argument(
        "--page-size", type=int, default=16, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument(
        "--backend", default="auto", choices=("auto", "sm90", "sm80", "reference"),
        help="of cute_attention; default: %(default)s",
    )  # fmt: skip
    group = parser.add_argument_group("the model and its training, as in train_gpt.py")
    names = ("layers", "heads", "heads-kv", "head-dim", "context", "batch")
    for name in names:
        group.add_argument(f"--{name}", type=int, metavar="N")
    group.add_argument("--steps", type=int, default=150, metavar="N", help="default: %(default)s")
    group.add_argument("--learning-rate", type=float, metavar="N")
    group.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    # What else train_gpt.py can be told stays at its default.
    parser.set_defaults(position="rotary", sink=False, dropout=0.0, compare=False)
    return parser


def settle(options: argparse.Namespace) -> tuple[Recipe, Text, train_gpt.Shape]:
    """Fills in what the device decides. Raises ValueError where the options do not fit together."""
    options.sample_bytes, options.prompts = 0, options.prompts or list(PROMPTS)
    shape, recipe = train_gpt.settle(options)
    if options.length < 1 or options.steps < 1 or options.page_size < 1:
        raise ValueError("--length, --steps and --page-size are positive whole numbers")
    if not all(options.prompts):
        raise ValueError("--prompt is empty: there is nothing to continue")
    longest = max(len(prompt.encode()) for prompt in options.prompts)
    needed = len(options.prefix.encode()) + longest + options.length
    if needed > shape.context:
        raise ValueError(
            f"prefix, prompt and --length {options.length} make {needed} bytes, more than the "
            f"--context {shape.context} that the model is trained for"
        )
    return recipe, load_text(options.files, shape.context), shape


def generate(options: argparse.Namespace, run: Run, recipe: Recipe) -> int:
    """Writes the texts both ways and reports. Returns the exit code."""
    prefix = options.prefix.encode()
    prompts = [prompt.encode() for prompt in options.prompts]
    with recipe.autocast():
        paged = functools.partial(write_paged, run.model, prefix, prompts)
        padded = functools.partial(write_padded, run.model, prefix, prompts)
        for write in (paged, padded):
            write(2)  # what a first call loads is not in the time
        ours, theirs = paged(options.length, options.page_size), padded(options.length)
        gap = largest_gap(run.model, ours.texts, options.length)
    show(options, ours)
    ratio = ours.tokens_per_second / theirs.tokens_per_second
    print(f"speed      {ours.tokens_per_second:,.0f} tokens per second with a paged cache")
    print(f"           {theirs.tokens_per_second:,.0f} with PyTorch's attention and a padded one")
    print(f"           ratio {ratio:.2f}")
    same = sum(mine == other for mine, other in zip(ours.texts, theirs.texts, strict=True))
    print(f"same       {same} of {len(prompts)} texts with both")
    tolerance = TOLERANCES[options.dtype]
    if gap <= tolerance:
        print(f"PASS: the texts are those without a cache (logits within {gap:.1g})")
        return 0
    print(
        f"FAIL: a byte was chosen whose logit lies {gap:.3g} below the largest without a cache, "
        f"allowed is {tolerance}"
    )
    return 1


def show(options: argparse.Namespace, ours: Texts) -> None:
    """The texts, without the prefix that all have."""
    prefix = len(options.prefix.encode())
    for text in ours.texts:
        print(f"{'-' * 80}\n{printable(text[prefix:])}")
    print("-" * 80)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        recipe, text, shape = settle(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"model      {shape}", flush=True)
    try:
        with use_backend(options.backend):
            attend = functools.partial(attention, causal=True)
            run = train("cute_attention", attend, shape, text, recipe)
            return generate(options, run, recipe)
    except BackendError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
