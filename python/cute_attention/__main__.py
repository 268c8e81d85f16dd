"""`python -m cute_attention`: the command line of the package."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m cute_attention"))
