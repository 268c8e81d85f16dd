"""The libraries that a search lacks, compiled into its folder."""

from __future__ import annotations

import dataclasses

from ..native import kernel_cache, toolchain
from ..native.resources import spilled_bytes
from ..rows.builds import Built, build_all
from ..rows.candidates import row_of
from .folder import Folder
from .plan import Entry


def compile_missing(found: Folder, jobs: int, limit_s: float) -> None:
    """Compiles what the folder of a search lacks, and writes the manifest after each library. A row
    that fails is recorded with the compiler's words and leaves the rest alone.

    Args:
        found: the search.
        jobs: how many compilers run at a time.
        limit_s: none is begun after so many seconds.

    Raises:
        BuildError: there is nothing to compile with.
    """
    places = {
        row_of(entry.columns): (i, j)
        for i, search in enumerate(found.searches)
        for j, entry in enumerate(search.entries)
        if not found.has(entry)
    }
    if not places:
        return
    toolchain.find()

    def done(built: Built) -> None:
        i, j = places[built.row]
        entries = list(found.searches[i].entries)
        entries[j] = _after(found, entries[j], built, is_present=j == 0)
        found.searches[i] = found.searches[i].with_entries(entries)
        found.save()

    # The present rows first, then the most promising candidate of each search, and so on.
    order = sorted(places, key=lambda row: (places[row][1], places[row][0]))
    build_all(order, found.chips, jobs, limit_s, done)


def _after(found: Folder, entry: Entry, built: Built, is_present: bool) -> Entry:
    """The entry as compiling has left it."""
    if built.error:
        return dataclasses.replace(entry, error=built.error, seconds=built.seconds)
    (library,) = [built.path] if built.path else kernel_cache.folder().glob(f"{built.name}-*.so")
    # No row of the tables spills, so one that does is no candidate for them, fast or not.
    if not is_present and (spilled := spilled_bytes(library)):
        error = f"it spills: its threads keep {spilled} bytes in local memory"
        return dataclasses.replace(entry, error=error, seconds=built.seconds)
    return found.adopt(entry, built.name, library, built.seconds)
