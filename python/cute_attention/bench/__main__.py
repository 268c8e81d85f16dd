"""`python -m cute_attention.bench`: the same as `python -m cute_attention bench`."""

from __future__ import annotations

import sys

from cute_attention.cli.bench import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m cute_attention.bench"))
