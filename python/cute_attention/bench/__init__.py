"""Measures attention side by side with its peers: `python -m cute_attention bench --help`.

The modules, in the order in which a measurement flows through them:

    points sets  what is measured: one shape, grids of them, named sets
    inputs       the tensors of a point
    contenders/  who is measured: our backends, PyTorch's, other packages
    builds/      ours in other builds, each in a process of its own
    steps        what is called: forward, backward, both
    memory       how much a step holds;  flops: how much work it is; how long it takes says
                 `cute_attention.timing`
    results      rows of figures, the machine they were measured on, JSON and CSV
    tables plots what a person sees

`speed`, `cycles`, `features`, `ladder`, `experiments`, `accuracy`, `robustness`, `memory_curve`,
`overhead` and `compare` hold what one subcommand each measures or shows. `commands` runs the
subcommands, and `cute_attention.cli.bench` reads their options.
"""
