"""Triangle attention with a learned pair bias: cute_attention beside PyTorch's best."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait sleep; read once, by torch

try:
    import torch
    from pair.block import TorchAttention, our_attention
    from pair.measure import Shape, deviations, measure
    from pair.report import plot, table
    from torch.nn.attention import SDPBackend

    import cute_attention
    from cute_attention import BackendError, use_backend
except ModuleNotFoundError as error:
    sys.exit(f"{error}: run `make demo`, or `pip install '.[bench]'` first")

DESCRIPTION = """\
A block of triangle attention, as in AlphaFold: the rows of a pair representation attend, with a
bias [1, heads, n, n] that is computed from the pair representation, shared by all rows and learned,
and the result is gated. Shows whether its results and all gradients are PyTorch's, and its speed
and peak memory beside PyTorch's best attention that gives a gradient of its mask: the EFFICIENT
backend of scaled_dot_product_attention on a GPU, MATH on a CPU, which runs small sizes only.
"""

EPILOG = """\
exit code: 0 if the results agree, 1 if not, 2 for wrong arguments.

examples:
  python examples/pair_bias.py
  python examples/pair_bias.py --residues 128,256,512,1024 --heads 8
  python examples/pair_bias.py --backend reference
"""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RESIDUES = {"cpu": (16, 32, 64), "cuda": (128, 256, 384, 512, 768)}
PEERS = {
    "cpu": ("MATH (SDPA)", SDPBackend.MATH),
    "cuda": ("EFFICIENT (SDPA)", SDPBackend.EFFICIENT_ATTENTION),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--residues", type=_sizes, metavar="N,N", help="the lengths of the rows")
    parser.add_argument("--channels", type=_positive, default=128, metavar="N")
    parser.add_argument("--heads", type=_positive, default=4, metavar="N")
    parser.add_argument("--head-dim", type=_positive, default=32, metavar="N")
    parser.add_argument("--device", choices=tuple(PEERS), help="default: a GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument(
        "--backend",
        default="auto",
        choices=("auto", "sm90", "sm80", "reference"),
        help="of cute_attention; default: %(default)s",
    )
    parser.add_argument(
        "--time-ms", type=_positive, default=100, metavar="MS", help="of each turn; default: 100"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder; default: %(default)s"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(size) for size in text.split(",")}))


def backend_report(shape: Shape, residues: int) -> str:
    """Which backend computes the attention, and why no faster one does."""
    block = shape.block(our_attention)
    q, k, v, bias = block.inputs(block.norm(shape.pair(residues)))
    return str(cute_attention.explain(q, k, v, bias=bias))


def agreement(shape: Shape, residues: int) -> bool:
    """Prints how far results lie from exact ones. Whether ours are as near as PyTorch's."""
    peer, backend = PEERS[shape.device.type]
    found = deviations(our_attention, TorchAttention(backend), shape, residues)
    print(f"\nlargest error over largest value, {residues} residues, beside float64:")
    for deviation in found:
        errors = f"{deviation.ours:.1e} ours, {deviation.theirs:.1e} {peer}"
        print(f"  {deviation.what:<28} {errors}")
    passed = all(deviation.within(shape.dtype) for deviation in found)
    print(f"{'PASS' if passed else 'FAIL'}: errors of at most twice {peer}'s, or a few roundings\n")
    return passed


def demonstrate(options: argparse.Namespace, shape: Shape) -> int:
    """Compares, measures, and writes the table and the picture. Returns the exit code."""
    print(backend_report(shape, options.residues[-1]))
    passed = agreement(shape, options.residues[0])
    peer, backend = PEERS[shape.device.type]
    attentions = {"cute-attention": our_attention, peer: TorchAttention(backend)}
    found = []
    for residues in options.residues:
        found += measure(attentions, shape, residues, options.time_ms)
        print(f"measured   {residues} residues", flush=True)
    on_gpu = shape.device.type == "cuda"
    machine = torch.cuda.get_device_name(shape.device) if on_gpu else "a CPU, small sizes"
    title = (
        f"Triangle attention with a learned pair bias on {machine}: {options.dtype}, "
        f"{shape.heads} heads of {shape.head_dim}; lower is better"
    )
    text = f"{title}\n\n{table(found)}\n"
    print(f"\n{text}")
    (options.output / "pair_bias.md").write_text(text)
    plot(options.output / "pair_bias.png", found, title)
    print(f"written    {options.output / 'pair_bias.png'}, {options.output / 'pair_bias.md'}")
    return 0 if passed else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU")
    on_cpu = options.device == "cpu"
    options.residues = options.residues or RESIDUES[options.device]
    options.dtype = options.dtype or ("fp32" if on_cpu else "bf16")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))
    shape = Shape(
        options.channels,
        options.heads,
        options.head_dim,
        torch.device(options.device),
        DTYPES[options.dtype],
    )
    if on_cpu:
        print("no GPU is used: small sizes on the CPU, by the reference backend and PyTorch's MATH")
    try:
        with use_backend(options.backend):
            return demonstrate(options, shape)
    except BackendError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
