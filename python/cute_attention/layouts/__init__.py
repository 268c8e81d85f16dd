"""The layout lab: see, prove and change a kernel's layouts without a GPU.

    python -m cute_attention layouts check            # every row of the tables
    python -m cute_attention layouts show sm80_fwd_bf16_d128

The lab shows and proves the layouts that the kernels compile with. It builds a small C++ program
that includes the kernels' own headers, lets CuTe do the partitioning, and writes the layouts down
(export.py).

    export     runs that program;  model: its layouts as tables of numbers
    trace      follows every element through the kernel;  hardware: what instructions do with it
    checks     the proofs, with limits, multiply, numbers, staged and handed;
               ncu: beside what a GPU counts (counters, launch)
    pictures   grids and figures;  show, diff, path, page: what a person sees
"""
