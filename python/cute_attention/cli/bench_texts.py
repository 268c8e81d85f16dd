"""The texts that teach the subcommands of `bench`."""

from __future__ import annotations

INTRODUCTION = """\
Measures attention: ours by backend, PyTorch's own, and every other package that is installed.

Without a GPU everything runs on the CPU at small shapes: the reference backend against PyTorch.
What cannot run is listed with the reason, at the end of each table.
"""

EPILOGUE = """\
start here:
  python -m cute_attention bench contenders         who can be measured on this machine
  python -m cute_attention bench speed --set short  short sequences, a few minutes
  python -m cute_attention bench speed --help       each subcommand teaches by examples

How times are taken, which FLOPs are counted and what the peak of a GPU means: docs/benchmarking.md
"""

SPEED = """\
Contenders take turns at every point, over several rounds, after a warm-up and with the L2 cache
flushed before each call. The time is the median of the rounds' medians; the spread is how far apart
the rounds lie. Results that differ between contenders are refused: nobody is fast by computing
something else.
"""

SPEED_EXAMPLES = """\
examples:
  # the paper's grid, forward and backward, all tables and a plot
  python -m cute_attention bench speed --direction fwd,bwd --json h200.json --plot h200.png
  # a quick look while tuning: two contenders, a part of the grid, under two minutes
  python -m cute_attention bench speed --set paper --head-dims 128 --seqlens 1024,8192 \\
      --contenders sm90,cudnn --rounds 3 --time-ms 30 --limit-s 120
  # one shape of your own
  python -m cute_attention bench speed --batch 2 --heads 32 --heads-kv 8 --seqlens 4096 \\
      --head-dims 128 --masks causal --window 1024,0
  # packed documents: 32k tokens, 2048 on average
  python -m cute_attention bench speed --packed 32768:2048 --heads 16 --head-dims 128 --masks causal
  # the shapes of 30 models, with the points at which a peer is faster
  python -m cute_attention bench speed --set models --direction fwd,bwd --plot models.png
  # a change of a kernel beside what was before it, and a peer
  python -m cute_attention bench speed --contenders sm90,fa3 --build before=builds/before
  # recorded figures of contenders that are not installed here
  python -m cute_attention bench speed --set paper --against recorded.json
"""

CYCLES = """\
Nsight Compute counts one call of each contender: cycles, instructions and bytes that memory moves,
of all its kernels together, with the L2 cache empty. At a clock that is held the cycles of a kernel
differ less from run to run than its time does at a free clock, so that they show what a small
change of a kernel is worth. `--build` counts ours in another build too. Without --contenders ours
alone is counted, sm90 and sm80.
"""

CYCLES_EXAMPLES = """\
examples:
  python -m cute_attention bench cycles --direction bwd --contenders sm90,fa3 --head-dims 128
  # a change of a kernel beside what was before it
  python -m cute_attention bench cycles --direction bwd --contenders sm90 \\
      --build before=builds/before
"""

STEPS = """\
One forward kernel at head dim 128, from plain to full: each step has one optimisation more than the
one before it, as a column of its row. Shows TFLOP/s, beside FlashAttention-2, and what explains
them: registers, shared memory, bank conflicts and instructions, predicted by the layout lab and
counted by Nsight Compute where it is. Without a GPU it shows what is predicted. docs/steps.md
explains the steps.
"""

STEPS_EXAMPLES = """\
examples:
  # on a machine with a GPU and nvcc; the first time builds 13 kernels, about a minute each
  python -m cute_attention bench steps --json steps.json --plot steps.png
  # built here, measured on a machine without nvcc
  python -m cute_attention bench steps --build-only --kernels kernels --chips 90
  python -m cute_attention bench steps --kernels kernels --json steps.json
"""

FEATURES = """\
What ALiBi, dropout, softcap, sinks and their combinations cost: the speed of our call with each,
over that of our plain call in the same rounds, and whether it reaches its target. Beside it stand
the peers that can do the same. Exit code 1 if a target is missed or a peer is ahead.
"""

FEATURES_EXAMPLES = """\
examples:
  python -m cute_attention bench features --json features.json --markdown features.md
  # a quick look while tuning; FlexAttention compiles for every shape, which takes long
  python -m cute_attention bench features --features dropout,alibi --head-dims 128 \\
      --seqlens 4096 --contenders sm90,efficient,flash --rounds 3 --time-ms 10
  python -m cute_attention bench features --features softcap+alibi,sink --masks causal
"""

LADDER = """\
The steps from the plain formula to the fastest kernel, each timed and with its peak memory, and how
both grow with the sequence length. A step that this machine lacks is listed with the reason.
"""

LADDER_EXAMPLES = """\
examples:
  python -m cute_attention bench ladder --plot ladder.png
  python -m cute_attention bench ladder --seqlens 1024,2048,4096 --direction fwd
"""

EXPERIMENTS = """\
One size is varied at a time, all else equal: block size, dtype (fp32 on the reference backend,
fp16, bf16), sequence length, head dim, heads. For each value the time, the peak memory and the
TFLOP/s of ours and of peers. On a GPU the block sizes are those of forward rows, which nvcc
compiles, a minute each; without one they are blocks of keys on the reference backend. What cannot
run is listed with the reason.
"""

EXPERIMENTS_EXAMPLES = """\
examples:
  python -m cute_attention bench experiments --plot experiments.png --json experiments.json
  # the kernels of the blocks are built here, and measured on a machine without nvcc
  python -m cute_attention bench experiments --build-only --arch sm90 --kernels blocks
  python -m cute_attention bench experiments --kernels blocks --json experiments.json
  # two of them, around a point of your own
  python -m cute_attention bench experiments --experiments length,heads --batch 1 --heads 8 \\
      --head-dims 64 --seqlens 1024,4096,16384 --masks causal --direction fwd
"""

ACCURACY = """\
Errors of output, LSE and gradients against float64 over several draws, and a verdict: ours must be
at most 1.10 times those of the better of FLASH and cuDNN on the same inputs, beyond what the draws
leave open, and at most twice those of plain PyTorch in the same dtype. Exit code 1 if they are not.
"""

ACCURACY_EXAMPLES = """\
examples:
  python -m cute_attention bench accuracy
  python -m cute_attention bench accuracy --dtypes bf16 --head-dims 128 --inputs outlier
  python -m cute_attention bench accuracy --inputs normal,q-x3,q-x5,q-x10 --draws 16 \\
      --contenders sm90,sm80,auto,flash,cudnn,plain
"""

ROBUSTNESS = """\
Inputs made to break an online softmax, such as attention sinks, scores that grow from tile to tile
and keys hidden by -infinity: the error of each result against float64, beside the better of FLASH
and cuDNN, and the time over that of standard normal inputs of the same shape, measured in turn.
Exit code 1 where a time or an error of ours is above its limit.
"""

ROBUSTNESS_EXAMPLES = """\
examples:
  python -m cute_attention bench robustness --list
  python -m cute_attention bench robustness --json robustness.json
  python -m cute_attention bench robustness --inputs sink,slope --head-dims 128 --dtypes bf16 \\
      --direction fwd --contenders sm90,flash
"""

DECODE = """\
One query per sequence against a KV cache: bytes of K and V per second for a grid of head layouts
and batches. Contenders are ours (`attention_with_cache`), flash_attn_with_kvcache of
FlashAttention-3, FlashInfer's decode with pages, and PyTorch's attention. Exit code 1 where ours is
behind the fastest peer at any point, or below 1.2 of it in the geometric mean.
"""

DECODE_EXAMPLES = """\
examples:
  python -m cute_attention bench decode --json decode.json --plot decode.png
  python -m cute_attention bench decode --page-size 64 --contenders sm90,fa3,flashinfer
  python -m cute_attention bench decode --layouts 32/8x128 --batches 1x131072,8x8192 --time-ms 30
"""

MEMORY = """\
Peak memory beyond the inputs, forward (no gradient) and forward with backward, against the sequence
length. Ours must be linear. Exit code 1 if it is not.
"""

MEMORY_EXAMPLES = """\
examples:
  python -m cute_attention bench memory --plot memory.png
  python -m cute_attention bench memory --contenders reference,plain --seqlens 1024,2048,4096
"""

OVERHEAD = """\
Host microseconds per call: without and with gradient recorded, and with the backward; dense, with
the LSE returned, packed, and decoding, where each call has another number of keys; called plainly
(eager), through torch.compile (compiled), and replayed as a CUDA graph (graph).
"""

OVERHEAD_EXAMPLES = """\
examples:
  python -m cute_attention bench overhead
  python -m cute_attention bench overhead --contenders auto,flash --modes eager
  python -m cute_attention bench overhead --forms decode,packed
"""

COMPARE = """\
Two JSON files of the same subcommand side by side. A row moved if it changed by more than the
threshold and by more than the larger spread of the two. Exit code 1 if a row of ours is worse or no
longer measured.
"""

COMPARE_EXAMPLES = """\
examples:
  python -m cute_attention bench compare before.json after.json
  python -m cute_attention bench compare before.json after.json --threshold 0.1 --all
"""

PLOT = """\
The chart of a JSON file that `speed` has written: lines over the sequence length, or, of points
that have names, every contender's speed over that of the best peer. Of a file of `steps` or
`experiments` the chart that these draw.
"""

PLOT_EXAMPLES = """\
examples:
  python -m cute_attention bench plot h200.json --output h200.png
  python -m cute_attention bench plot h200.json --output forward.svg --direction fwd
"""
