"""What `decode` prints and draws: TB/s of each contender, ours over the best peer, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .contenders import OURS, PEER
from .ratios import best, by_point, geometric_mean, versus
from .results import Row
from .tables import make_table, measured_columns, number, ratio_text, titled

LEAST = 1.0  # of the fastest peer, at every point
MEAN = 1.2  # of the fastest peer, in the geometric mean


def progress(heading: str, rows: Sequence[Row]) -> list[str | Text]:
    """The contenders of one point, fastest first, and the command that measures it again."""
    point = rows[0].point
    lines: list[str | Text] = [
        Text(f"{heading} {point.label}, {point.batch} x {point.seqlen_k} keys", style="bold")
    ]
    for row in sorted((r for r in rows if r.metrics), key=lambda r: r.metrics["time_ms"]):
        metrics = row.metrics
        lines.append(
            f"    {titled(row.contender):22} {number(metrics['tbytes_s']):>8} TB/s "
            f"{number(1e3 * metrics['time_ms']):>9} us"
        )
    lines += [
        Text(f"    {titled(row.contender):22} - {row.reason}", style="dim")
        for row in rows
        if row.reason
    ]
    return lines


def print_decode(console: Console, rows: Sequence[Row]) -> bool:
    """The table and the verdict; whether ours reach what they should. Without a peer there is
    nothing to fall short of, and the reference backend is not about speed."""
    columns = measured_columns(rows)
    table = make_table("decoding: TB/s of K and V, one query per sequence")
    for name in ("heads x dim", "batch", "keys", *map(titled, columns), "ours, us", "ours / peer"):
        table.add_column(name, justify="right")
    layout = None
    for (_, point), group in by_point(rows).items():
        if layout not in (None, point.label):
            table.add_section()
        layout = point.label
        found = {row.contender: row.metrics for row in group if row.metrics}
        cells = [number(found[n]["tbytes_s"]) if n in found else "-" for n in columns]
        ours, peer = best(group, OURS), best(group, PEER)
        time = number(1e3 * ours.metrics["time_ms"]) if ours else "-"
        ratio = ratio_text(ours.metrics["tflops"] / peer.metrics["tflops"]) if ours and peer else ""
        sizes = str(point.batch), str(point.seqlen_k)
        table.add_row(point.label, *sizes, *cells, time, ratio)
    console.print()
    console.print(table)
    return _print_verdict(console, rows)


def _print_verdict(console: Console, rows: Sequence[Row]) -> bool:
    fastest: dict[object, float] = {}
    for pair in versus(row for row in rows if row.contender != "reference"):
        fastest[pair.point] = max(pair.ratio, fastest.get(pair.point, 0.0))
    if not fastest:
        console.print("no verdict: no peer was measured, or no kernel of ours")
        return True
    mean, least = geometric_mean(list(fastest.values())), min(fastest.values())
    behind = sum(ratio < LEAST for ratio in fastest.values())
    words = (
        f"ours over the fastest peer at {len(fastest)} points: geometric mean {mean:.2f} (wanted "
        f"{MEAN}), least {least:.2f} (wanted {LEAST:.1f}), behind at {behind}"
    )
    passed = mean >= MEAN and not behind
    style = "bold green" if passed else "bold red"
    console.print(Text(f"{'PASS' if passed else 'FAIL'}: {words}", style=style))
    return passed


def plot_decode(path: Path, rows: Sequence[Row], machine: str) -> None:
    """TB/s of every contender: a panel for each head layout, the batches side by side."""
    import matplotlib.pyplot as plt

    from .chart_style import against, clean, length, line_handles, roles_of, save, style

    measured = [row for row in rows if row.metrics]
    layouts = list(dict.fromkeys(row.point.label for row in measured))
    size = (max(7.0, 3.4 * len(layouts) + 0.5), 3.6)
    figure, axes = plt.subplots(1, len(layouts), figsize=size, squeeze=False, sharey=True)
    for axis, layout in zip(axes[0], layouts, strict=True):
        part = [row for row in measured if row.point.label == layout]
        batches = list(dict.fromkeys((row.point.batch, row.point.seqlen_k) for row in part))
        for name, role in roles_of(part).items():
            values = [
                (batches.index((row.point.batch, row.point.seqlen_k)), row.metrics["tbytes_s"])
                for row in part
                if row.contender == name
            ]
            axis.plot(*zip(*sorted(values), strict=True), **style(name, role))
        names = [f"{batch} x {length(keys)}" for batch, keys in batches]
        axis.set_xticks(range(len(batches)), names, rotation=60, fontsize=8)
        clean(axis, "y")
        text, colour = against(part)
        axis.set_title(f"heads {layout}", fontsize=9, loc="left")
        axis.set_title(text, fontsize=8, loc="right", color=colour, fontweight="bold")
    axes[0][0].set_ylabel("TB/s")
    axes[0][0].set_ylim(bottom=0)
    title = f"Decoding on {machine}: TB/s of K and V, higher is better"
    save(figure, path, title, line_handles(roles_of(measured)))
