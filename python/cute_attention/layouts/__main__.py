"""`python -m cute_attention.layouts`: the same as `python -m cute_attention layouts`."""

from __future__ import annotations

import sys

from cute_attention.cli.layouts import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m cute_attention.layouts"))
