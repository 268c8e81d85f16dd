"""Other builds of this package as contenders of `speed --build`: a kernel before a change and after
it, in one run. Two builds do not fit into one process, so each has a process of its own."""

from .bench import BuildsBench
from .build import Build, builds_of
from .contender import InBuild, with_builds
from .process import BuildProcess, running

__all__ = ["Build", "BuildProcess", "BuildsBench", "InBuild", "builds_of", "running", "with_builds"]
