"""The layout lab: see, prove and change a kernel's layouts without a GPU.

    python -m cute_attention layouts check            # every row of the tables
    python -m cute_attention layouts show sm80_fwd_bf16_d128

What is shown and proven are the layouts that the kernels compile with: a small C++ program, made
from the headers of the kernels, writes them down (export.py); CuTe itself does the partitioning.
"""
