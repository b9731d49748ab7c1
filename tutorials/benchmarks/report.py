"""Make a Markdown table and a plot from records of run.py, and from nothing else."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import records

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

RECORDS = Path(__file__).with_name("records")
OURS = ("fused", "split", "in-step", "bare", "reference")
HIGHLIGHT, PLAIN = "tab:orange", "tab:blue"
MEBIBYTE = 2**20


def main(arguments: list[str]) -> None:
    """Print the tables, write them and the plot."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    files = options.records or sorted(RECORDS.glob("*.json"))
    try:
        found = [records.read(file) for file in files]
    except ValueError as error:
        parser.exit(2, f"report.py: error: {error}\n")
    if not found:
        parser.exit(2, "report.py: error: there are no records yet; run run.py first\n")
    text = "\n".join(section(record) for record in found)
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "report.md").write_text(text, encoding="utf-8")
    draw(found, options.output / "report.png")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD", help="JSON files of run.py (default: all in records/)")
    parser.add_argument("--output", type=Path, default=RECORDS, metavar="DIR",
                        help="folder for report.md and report.png (default: records/)")
    return parser


# --- tables ----------------------------------------------------------------------------------------------------------------


def section(record: dict) -> str:
    """A record as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    quick = " **A quick run: its figures say nothing.**" if record["quick"] else ""
    commit = (record["commit"] or "unknown")[:12]
    where = f"{record['cores']} cores, {record['memory_gib']} GiB, {record['machine']}; {versions}; commit {commit}"
    changed = " with uncommitted changes" if record["uncommitted_changes"] else ""
    head = [f"## {record['suite']}", "", f"`{record['command']}`, {record['date'][:10]}; {where}{changed}.{quick}"]
    tables = [table(record["suite"], group) for group in record["groups"]]
    if record["suite"] == "scaling":
        tables.insert(0, lengths_table(record))
    if record["suite"] == "distributed":
        tables.insert(0, exchanges_table(record))
    return "\n".join([*head, "", *tables])


def table(suite: str, group: dict) -> str:
    """A group as Markdown: who was measured, in order of the median, then who was not, and why."""
    cells = memory_cells if suite == "memory" else time_cells
    titles = {"memory": ("growth of peak RSS, MiB", "of which the batch, MiB"), "mnist": ("s per epoch", "quartiles")}.get(
        suite, ("ms per microbatch", "quartiles"))
    base = f"x {group['base']}" if group["base"] else "ratio"
    traffic = ("collectives a window", "KiB a window") if suite == "distributed" else ()
    rows = [("contestant", *titles, base, "quartiles", "state / parameters", "difference", *traffic)]
    rows.append(("-",) * len(rows[0]))
    measured = {name: figures for name, figures in group["contestants"].items() if "spread" in figures}
    for name in sorted(measured, key=lambda name: measured[name]["spread"]["median"]):
        figures = measured[name]
        rows.append((f"**{name}**" if name in OURS else name, *cells(suite, group, figures), *ratio_cells(figures), state_cell(figures),
                     f"{figures['difference']:.0e}" if "difference" in figures else "", *(traffic and traffic_cells(figures))))
    lines = ["|" + "|".join(row) + "|" for row in rows]
    absent = [f"- {name}: {figures['status']}: {figures['message']}"
              for name, figures in group["contestants"].items() if "message" in figures]
    rounds = max((len(figures["samples"]) for figures in measured.values()), default=0)
    case = ", ".join(f"{key} {value}" for key, value in group["case"].items())
    return "\n".join([f"### {group['name']}", "", f"{case}; {rounds} rounds.", "", *lines, "", *absent, ""])


def time_cells(suite: str, group: dict, figures: dict) -> tuple[str, str]:
    """Median and quartiles."""
    # A sample is seconds for a microbatch; an epoch has as many as the group says.
    factor = group["microbatches"] if suite == "mnist" else 1e3
    spread = figures["spread"]
    return f"{spread['median'] * factor:.3f}", f"{spread['q1'] * factor:.3f} to {spread['q3'] * factor:.3f}"


def memory_cells(suite: str, group: dict, figures: dict) -> tuple[str, str]:
    """Growth, and the batch itself."""
    return f"{figures['spread']['median'] / MEBIBYTE:.0f}", f"{figures['data_bytes'] / MEBIBYTE:.0f}"


def ratio_cells(figures: dict) -> tuple[str, str]:
    """Median of the paired ratios and their quartiles."""
    if "ratio" not in figures:
        return "", ""
    ratio = figures["ratio"]
    return f"{ratio['median']:.2f}", f"{ratio['q1']:.2f} to {ratio['q3']:.2f}"


def state_cell(figures: dict) -> str:
    """Bytes kept from call to call, in parameters."""
    return f"{figures['state_bytes'] / figures['parameter_bytes']:.2f}" if figures.get("parameter_bytes") else ""


def traffic_cells(figures: dict) -> tuple[str, str]:
    """Calls of collectives, and what a rank hands to them."""
    return str(figures["collectives"]), f"{figures['collective_bytes'] / 1024:.1f}"


def exchanges_table(record: dict) -> str:
    """An exchange for each window against one for each microbatch: time, round by round, and bytes."""
    rows = [("group", "time, window / microbatch", "quartiles", "bytes, window / microbatch"), ("-",) * 4]
    for group in record["groups"]:
        window, microbatch = (group["contestants"].get(name, {}) for name in ("window", "microbatch"))
        if window.get("samples") and microbatch.get("samples"):
            ratio = records.spread([a / b for a, b in zip(window["samples"], microbatch["samples"])])
            times = microbatch["collective_bytes"] / window["collective_bytes"]
            rows.append((group["name"], *ratio_cells({"ratio": ratio}), f"1/{times:g}"))
    return "\n".join(["|" + "|".join(row) + "|" for row in rows] + [""])


def lengths_table(record: dict) -> str:
    """Ratio of each contestant against the length of the window; of ours, also without the update that its microbatches share."""
    lines = {**lengths(record), **lengths_without_update(record)}
    counts = sorted({n for points in lines.values() for n in points})
    rows = [("x floor at N =", *map(str, counts)), ("-",) * (len(counts) + 1)]
    rows += [(name, *(f"{points[n]['median']:.2f}" if n in points else "" for n in counts)) for name, points in lines.items()]
    return "\n".join(["|" + "|".join(row) + "|" for row in rows] + [""])


def lengths(record: dict) -> dict[str, dict[int, dict]]:
    """Of the scaling suite: spread of the ratio by contestant and length of the window, on the MLP."""
    points: dict[str, dict[int, dict]] = {}
    for length, _, contestants in _mlps(record):
        for name, figures in contestants.items():
            points.setdefault(name, {})[length] = figures["ratio"]
    return points


def lengths_without_update(record: dict) -> dict[str, dict[int, dict]]:
    """As `lengths`, of ours less the update alone, each difference taken within a round."""
    points: dict[str, dict[int, dict]] = {}
    for length, base, contestants in _mlps(record):
        for name in OURS:
            if name in contestants and "update-only" in contestants:
                rounds = zip(*(contestants[who]["samples"] for who in (name, "update-only", base)))
                points.setdefault(f"{name} less update-only", {})[length] = records.spread(
                    [(sample - update) / floor for sample, update, floor in rounds])
    return points


def _mlps(record: dict) -> Iterator[tuple[int, str, dict]]:
    """`(length of the window, base, figures by name)` of whoever was timed on an MLP."""
    for group in record["groups"]:
        if group["case"]["network"].startswith("mlp"):
            measured = {name: figures for name, figures in group["contestants"].items() if "ratio" in figures}
            yield group["case"]["accumulate_step"], group["base"], measured


# --- plot ------------------------------------------------------------------------------------------------------------------


def draw(found: list[dict], file: Path) -> None:
    """A panel for each group; the window's lengths share one."""
    panels = [panel for record in found for panel in panels_of(record)]
    height = 1.5 + 0.28 * max(bars for bars, _ in panels)
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, height * rows), squeeze=False, layout="constrained")
    for axis, (_, panel) in zip(axes.flat, panels):
        panel(axis)
    for axis in axes.flat[len(panels):]:
        axis.remove()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def panels_of(record: dict) -> list[tuple[int, object]]:
    """`(bars, draw on axes)` of each panel."""
    groups = record["groups"]
    panels = []
    if record["suite"] == "scaling":
        panels.append((8, lambda axis: draw_lengths(axis, record)))
        groups = [group for group in groups if not group["case"]["network"].startswith("mlp")]
    if record["suite"] == "distributed":
        panels.append((8, lambda axis: draw_ranks(axis, record)))
        groups = []
    for group in groups:
        panels.append((len(group["contestants"]), lambda axis, group=group: draw_bars(axis, record, group)))
    return panels


def draw_bars(axis: Axes, record: dict, group: dict) -> None:
    """A bar for each contestant: the median; a whisker for the quartiles, the paired ratio as its label."""
    factor, unit = {"memory": (1 / MEBIBYTE, "growth of peak RSS, MiB"), "mnist": (group.get("microbatches", 1), "s per epoch")}.get(
        record["suite"], (1e3, "ms per microbatch"))
    measured = [(name, figures) for name, figures in group["contestants"].items() if "spread" in figures]
    measured.sort(key=lambda entry: -entry[1]["spread"]["median"])
    if measured:
        names = [name for name, _ in measured]
        spreads = [figures["spread"] for _, figures in measured]
        medians = [spread["median"] * factor for spread in spreads]
        whiskers = [[(spread["median"] - spread["q1"]) * factor for spread in spreads],
                    [(spread["q3"] - spread["median"]) * factor for spread in spreads]]
        bars = axis.barh(names, medians, xerr=whiskers, color=[HIGHLIGHT if name in OURS else PLAIN for name in names], ecolor="0.3")
        labels = [f"x {figures['ratio']['median']:.2f}" if "ratio" in figures else "" for _, figures in measured]
        axis.bar_label(bars, labels, padding=4, fontsize=8)
    axis.margins(x=0.15)
    axis.set(title=f"{record['suite']}: {group['name']}", xlabel=unit + (f"; x {group['base']}" if group["base"] else ""))


def draw_ranks(axis: Axes, record: dict) -> None:
    """Time of a microbatch against the ranks: a colour for each way to exchange, a line style for each length of the window."""
    lines: dict[tuple[str, int], list[tuple[int, dict]]] = {}
    for group in record["groups"]:
        for name, figures in group["contestants"].items():
            if "spread" in figures:
                lines.setdefault((name, group["case"]["accumulate_step"]), []).append((group["case"]["ranks"], figures["spread"]))
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in lines))}
    shortest = min(n for _, n in lines)
    for (name, n), points in lines.items():
        ranks, spreads = zip(*points)
        axis.plot(ranks, [spread["median"] * 1e3 for spread in spreads], marker="o", color=colours[name],
                  linestyle="--" if n == shortest else "-", label=f"{name}, N = {n}")
        axis.fill_between(ranks, [spread["q1"] * 1e3 for spread in spreads], [spread["q3"] * 1e3 for spread in spreads],
                          color=colours[name], alpha=0.15)
    axis.set_xticks(sorted({group["case"]["ranks"] for group in record["groups"]}))
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(fontsize=8)
    axis.set(title=f"distributed: MLP, {record['cores']} cores for all ranks", xlabel="ranks", ylabel="ms per microbatch")


def draw_lengths(axis: Axes, record: dict) -> None:
    """Ratio to the floor against the length of the window."""
    for name, points in lengths(record).items():
        counts = sorted(points)
        axis.plot(counts, [points[n]["median"] for n in counts], marker="o", label=name)
        axis.fill_between(counts, [points[n]["q1"] for n in counts], [points[n]["q3"] for n in counts], alpha=0.15)
    axis.set_xscale("log", base=2)
    axis.legend(fontsize=8)
    axis.set(title="scaling: MLP", xlabel="microbatches in a window", ylabel="x floor")


if __name__ == "__main__":
    main(sys.argv[1:])
