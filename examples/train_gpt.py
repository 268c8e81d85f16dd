"""Trains a small GPT on bytes of text, with attention through cute_attention."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Threads that wait for each other should sleep: where other programs use the cores too, spinning
# makes a step five to fifteen times slower. PyTorch reads this once, when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

try:
    import torch
    from gpt import step_time
    from gpt.model import Shape
    from gpt.position import POSITIONS
    from gpt.report import backend_report, plot, verdict_on_curves, verdict_on_loss, write_csv
    from gpt.sampling import sample
    from gpt.text import Text, load_text
    from gpt.training import DTYPES, Deviation, Recipe, Run, train

    from cute_attention import BackendError, attention, use_backend
except ModuleNotFoundError as error:
    sys.exit(f"{error}: run `make demo`, or `pip install '.[demo]'` first")

DESCRIPTION = """\
Trains a small GPT with grouped-query attention on bytes of text. Its attention is
cute_attention.attention, on the GPU if there is one, with rotary embeddings, ALiBi or T5's learned
biases, and with dropout and sinks if asked for. Shows the progress, which backend ran and why, the
speed, a sample of what the model writes, and whether the loss fell to under half of its start.
"""

EPILOG = """\
exit code: 0 if the loss halved (and, with --compare, the curves agree), 1 if not, 2 for wrong
arguments.

examples:
  python examples/train_gpt.py                        the package's own sources and documentation
  python examples/train_gpt.py book.txt --prompt "It was "
  python examples/train_gpt.py --compare              PyTorch's attention beside ours
  python examples/train_gpt.py --compare --head-dim 128 --heads 4 --heads-kv 1
  python examples/train_gpt.py --position alibi --dropout 0.1 --sink
  python examples/train_gpt.py --position t5 --compare
  python examples/train_gpt.py --steps 50 --layers 2  a quick look
"""


@dataclass(frozen=True)
class Defaults:
    """What fits a device: a minute on two CPU cores, a model that fills a GPU."""

    steps: int
    batch: int
    learning_rate: float
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    context: int
    dtype: str


DEFAULTS = {
    "cpu": Defaults(450, 8, 4e-3, 4, 4, 2, 32, 128, "fp32"),
    "cuda": Defaults(400, 16, 1e-3, 8, 8, 2, 64, 1024, "bf16"),
}

# How far two loss curves may lie apart that differ in rounding alone. Rounding grows as training
# goes on: measured on a CPU over the default run, fp32 deviates by 0.0006 in the mean and by 0.005
# at most, bf16 (150 steps) by 0.004 and 0.02. A scale that is 2.5 times too small leaves them.
TOLERANCES = {
    "fp32": Deviation(mean=0.01, largest=0.05),
    "bf16": Deviation(mean=0.03, largest=0.15),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, help="text; default: the package's own")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="time a step with ours and with PyTorch's attention, and train once more with "
        "PyTorch's fastest",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder; default: %(default)s"
    )
    group = parser.add_argument_group("where it runs")
    group.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    group.add_argument(
        "--dtype", choices=DTYPES, help="default: bf16 (autocast) on a GPU, fp32 on a CPU"
    )
    group.add_argument(
        "--backend",
        default="auto",
        choices=("auto", "sm90", "sm80", "reference"),
        help="of cute_attention; default: %(default)s",
    )
    group = parser.add_argument_group("the model and its training; defaults: CPU, GPU")
    for flag, kind, meaning in (
        ("layers", _positive, "blocks of attention and MLP"),
        ("heads", _positive, "query heads; the width is heads x head dim"),
        ("heads-kv", _positive, "key and value heads; has to divide the heads"),
        ("head-dim", _positive, "even where positions are rotary"),
        ("context", _positive, "bytes that one byte sees"),
        ("batch", _positive, "sequences in a step"),
        ("steps", _positive, "updates of the weights"),
        ("learning-rate", _positive_float, "the highest, after the warm-up"),
    ):
        name = flag.replace("-", "_")
        cpu, gpu = (getattr(DEFAULTS[device], name) for device in ("cpu", "cuda"))
        group.add_argument(f"--{flag}", type=kind, metavar="N", help=f"{meaning}: {cpu}, {gpu}")
    group.add_argument(
        "--position",
        default="rotary",
        choices=tuple(POSITIONS),
        help="how attention knows where tokens are: q and k are turned (rotary), scores fall with "
        "the distance (alibi), or a learned bias is added to them (t5); default: %(default)s",
    )
    group.add_argument(
        "--dropout",
        type=_share,
        default=0.0,
        metavar="P",
        help="share of the attention probabilities to drop in training; default: %(default)g",
    )
    group.add_argument(
        "--sink", action="store_true", help="each head learns a logit of its softmax's denominator"
    )
    group.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    group = parser.add_argument_group("the sample at the end")
    group.add_argument("--prompt", default="def ", help="default: %(default)r")
    group.add_argument(
        "--sample-bytes", type=int, default=500, metavar="N", help="0: none; default: %(default)s"
    )
    group.add_argument(
        "--temperature", type=_positive_float, default=0.6, metavar="T", help="default: %(default)s"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive, finite number")
    return number


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return number


def settle(options: argparse.Namespace) -> tuple[Shape, Recipe]:
    """Fills in the device's defaults. Raises ValueError where the options do not fit together."""
    device = _device(options.device)
    for name, value in vars(DEFAULTS[device.type]).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.heads % options.heads_kv:
        raise ValueError(f"--heads-kv {options.heads_kv} does not divide --heads {options.heads}")
    if options.position == "rotary" and options.head_dim % 2:
        raise ValueError(f"--head-dim {options.head_dim} is odd: rotary embeddings turn pairs")
    if options.sample_bytes and not options.prompt:
        raise ValueError("--prompt is empty: the sample continues it")
    if options.compare and options.sink:
        raise ValueError("--compare: PyTorch's attention has no sink, so nothing equals --sink")
    shape = Shape(
        options.layers,
        options.heads,
        options.heads_kv,
        options.head_dim,
        options.context,
        position=options.position,
        sink=options.sink,
        dropout=options.dropout,
    )
    dtype = DTYPES[options.dtype]
    recipe = Recipe(
        options.steps, options.batch, options.learning_rate, options.seed, device, dtype
    )
    return shape, recipe


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:N") from error
    if device.type not in DEFAULTS:
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: PyTorch sees {torch.cuda.device_count()} GPUs")
    return device


def demonstrate(options: argparse.Namespace, shape: Shape, recipe: Recipe, text: Text) -> int:
    """Trains, samples, compares where asked for, and reports. Returns the exit code."""
    attend = functools.partial(attention, causal=True)
    runs = [train("cute_attention", attend, shape, text, recipe)]
    if options.compare:
        theirs = step_time.torch_attentions(recipe.device)
        times = step_time.measure({runs[0].name: attend, **theirs}, shape, text, recipe)
        fastest = theirs[step_time.best(times[1:]).name]
        runs.append(train("PyTorch's attention", fastest, shape, text, recipe))
    print(backend_report(runs[0].model, recipe))
    for run in runs:
        speed = f"{run.tokens_per_second:,.0f} tokens per second"
        print(f"speed      {speed} in {run.seconds:.1f} s of training with {run.name}")
    if options.compare:
        print(f"time of a training step, in turn:\n{step_time.table(times)}")
    tolerance = TOLERANCES[options.dtype]
    write_csv(options.output / "losses.csv", runs)
    plot(options.output / "loss.png", runs, f"A GPT of {shape}", tolerance)
    print(f"written    {options.output / 'loss.png'}, {options.output / 'losses.csv'}")
    if options.sample_bytes:
        show_sample(options, runs[0], recipe)
    passed, words = verdict_on_loss(runs[0])
    print(words)
    if options.compare and shape.dropout:
        print("not judged: the two loss curves, since PyTorch's dropout draws other bits")
    elif options.compare:
        agree, words = verdict_on_curves(runs[0], runs[1], tolerance)
        print(words)
        passed = passed and agree
    return 0 if passed else 1


def show_sample(options: argparse.Namespace, run: Run, recipe: Recipe) -> None:
    prompt = options.prompt.encode()
    with recipe.autocast():
        text = sample(run.model, prompt, options.sample_bytes, options.temperature, options.seed)
    print(f"sample     after {options.prompt!r}\n{'-' * 80}\n{text}\n{'-' * 80}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        shape, recipe = settle(options)
        text = load_text(options.files, shape.context)
        options.output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"text       {text.train.numel() + text.held_out.numel():,} bytes: {text.origin}")
    print(f"model      {shape}")
    print(
        f"training   {recipe.steps} steps of {recipe.batch} x {shape.context} bytes, "
        f"{options.dtype} on {recipe.device}, seed {recipe.seed}",
        flush=True,
    )
    try:
        with use_backend(options.backend):
            return demonstrate(options, shape, recipe, text)
    except BackendError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
