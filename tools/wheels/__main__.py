"""`python tools/wheels`: wheels of a release, a check that they install, a folder for the Hub."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from check import check_install
from hub import write_repository
from project import ROOT, check_machine
from release import build_release, report


def main() -> None:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(prog="python tools/wheels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    release = commands.add_parser("release", help="the sdist and all wheels, into dist/")
    release.add_argument("--only", default="", help="compile the rows that match this expression")
    release.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    check = commands.add_parser("check", help="install wheels into a fresh environment, try them")
    check.add_argument("--kernels", type=Path, required=True, help="a build folder with sm80 rows")
    check.add_argument("--torch", default="torch", help="the requirement to install")
    commands.add_parser("hub", help="a Hugging Face kernel repository from the wheels in dist/")
    arguments = parser.parse_args()
    check_machine(platform.machine())
    if arguments.command == "release":
        report(
            build_release(arguments.only, arguments.jobs, ROOT / "dist", ROOT / "build" / "wheels")
        )
    elif arguments.command == "check":
        check_install(arguments.kernels, arguments.torch, ROOT / "build" / "check-wheels")
    else:
        print(write_repository(ROOT / "dist", ROOT / "dist" / "hub"))


if __name__ == "__main__":
    main()
