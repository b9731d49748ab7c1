"""Make Markdown tables and a figure from records of run.py, and from nothing else.

Contestants that are gone since a record was made are left out.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
import records
from contestants import MODULES

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OURS, OTHERS = "tab:orange", "tab:blue"
MEBIBYTE = 2**20
# Memory of a device, to say what fits into it.
DEVICE = 64 * 2**30


def main(arguments: list[str]) -> None:
    """Print the tables, write them and the figures."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD",
                        help="JSON files of run.py (default: all in records/)")
    parser.add_argument("--output", type=Path, default=records.FOLDER, metavar="DIR",
                        help="folder for report.md, report.png and ascend.png (default: records/)")
    options = parser.parse_args(arguments)
    try:
        found = [without_gone(records.read(file)) for file in options.records or sorted(records.FOLDER.glob("*.json"))]
    except ValueError as error:
        parser.exit(2, f"report.py: error: {error}\n")
    text = "\n".join(section(record) for record in found if record["groups"])
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "report.md").write_text(text, encoding="utf-8")
    for record in found:
        if record["suite"] == "ascend":
            draw_ascend(record["groups"], options.output / "ascend.png")
    if not draw(found, options.output / "report.png"):
        print("report.py: no record of suite strategies with time and memory: no report.png", file=sys.stderr)


def without_gone(record: dict) -> dict:
    """The record without contestants that are gone, and groups in which nobody is left."""
    groups = []
    for group in record["groups"]:
        contestants = {name: figures for name, figures in group["contestants"].items() if name in MODULES}
        groups += [{**group, "contestants": contestants}] if contestants else []
    return {**record, "groups": groups}


# --- tables -----------------------------------------------------------------------------------------------------------


def section(record: dict) -> str:
    """A record as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    quick = " **A quick run: its figures say nothing.**" if record["quick"] else ""
    changed = " with uncommitted changes" if record["uncommitted_changes"] else ""
    commit = (record["commit"] or "unknown")[:12] + changed
    where = f"{record['cores']} cores, {record['memory_gib']} GiB, {record['machine']}; {versions}; commit {commit}"
    head = [f"## {record['suite']}", "", f"`{record['command']}`, {record['date'][:10]}; {where}.{quick}", ""]
    first = {"scaling": lengths_table, "distributed": exchanges_table}.get(record["suite"])
    made = ascend_table if record["suite"] == "ascend" else table
    tables = [*([first(record)] if first else []), *(made(group, record["suite"]) for group in record["groups"])]
    return "\n".join([*head, *tables])


def table(group: dict, suite: str) -> str:
    """A group as Markdown: who was measured, in order of the median, then who was not, and why."""
    # A sample is seconds for a microbatch; of the suite memory, bytes; of first calls, seconds of two windows.
    unit, factor, digits = "ms per microbatch", 1e3, 3
    if suite == "memory":
        unit, factor, digits = "growth of peak RSS, MiB", 1 / MEBIBYTE, 0
    elif suite == "first_calls":
        unit, factor, digits = "processor time, s", 1, 1
    measured = {name: figures for name, figures in group["contestants"].items() if "spread" in figures}
    rounds = max((len(figures["samples"]) for figures in measured.values()), default=0)
    columns = {
        unit: lambda f: f"{f['spread']['median'] * factor:.{digits}f}",
        "quartiles": lambda f: quartiles(f["spread"], factor, digits),
        f"x {group['base']}": lambda f: f"{f['ratio']['median']:.2f}",
        "quartiles of the ratio": lambda f: quartiles(f["ratio"]),
        "state / parameters": state_share,
        "difference": lambda f: f"{f['difference']:.0e}",
        "first window, s": lambda f: f"{f['first_window']:.1f}" if suite == "strategies" else "",
        "growth of memory, MiB": lambda f: f"{f['growth_spread']['median'] / MEBIBYTE:.0f}",
        "quartiles of the growth": lambda f: quartiles(f["growth_spread"], 1 / MEBIBYTE, 0),
        "of which the batch, MiB": lambda f: f"{f['data_bytes'] / MEBIBYTE:.0f}",
        "collectives a window": lambda f: str(f["collectives"]),
        "KiB a window": lambda f: f"{f['collective_bytes'] / 1024:.1f}",
    }
    rows = [(name, [cell(make, measured[name]) for make in columns.values()])
            for name in sorted(measured, key=lambda name: measured[name]["spread"]["median"])]
    used = [i for i, title in enumerate(columns) if any(cells[i] for _, cells in rows)]
    lines = [["contestant", *(list(columns)[i] for i in used)]]
    lines += [[bold(name), *(cells[i] for i in used)] for name, cells in rows]
    what = ", ".join(f"{key} {value}" for key, value in group["case"].items())
    return under(group, f"{what}; {rounds} rounds.", lines)


def cell(make: object, figures: dict) -> str:
    """A cell; empty if the figures lack what it shows."""
    try:
        return make(figures)
    except KeyError:
        return ""


def state_share(figures: dict) -> str:
    """What accumulation keeps, in sizes of the parameters; nothing of who never updates."""
    size = figures["parameter_bytes"]
    return f"{figures['state_bytes'] / size:.2f}" if size else ""


def quartiles(spread: dict, factor: float = 1, digits: int = 2) -> str:
    """Both quartiles."""
    return f"{spread['q1'] * factor:.{digits}f} to {spread['q3'] * factor:.{digits}f}"


def bold(name: str) -> str:
    """The name; of ours, in bold type."""
    return f"**{name}**" if name.startswith("ms_accum") else name


def markdown(lines: list) -> str:
    """A table of rows of cells; the first is its head."""
    head, *rows = ["|" + "|".join(line) + "|" for line in lines]
    return "\n".join([head, "|-" * len(lines[0]) + "|", *rows, ""])


def under(group: dict, what: str, lines: list) -> str:
    """The section of a group: its table, then who was not measured, and why."""
    absent = [f"- {name}: {figures['status']}: {figures['message']}"
              for name, figures in group["contestants"].items() if "message" in figures]
    return "\n".join([f"### {group['name']}", "", what, "", markdown(lines), *absent, *([""] if absent else [])])


def exchanges_table(record: dict) -> str:
    """An exchange for each window against one for each microbatch: time, round by round, and bytes."""
    lines = [("group", "time, window / microbatch", "quartiles", "bytes, window / microbatch")]
    for group in record["groups"]:
        window, microbatch = (group["contestants"].get(name, {}) for name in ("window", "microbatch"))
        if window.get("samples") and microbatch.get("samples"):
            ratio = records.spread([a / b for a, b in zip(window["samples"], microbatch["samples"])])
            times = microbatch["collective_bytes"] / window["collective_bytes"]
            lines.append((group["name"], f"{ratio['median']:.2f}", quartiles(ratio), f"1/{times:g}"))
    return markdown(lines)


def lengths_table(record: dict) -> str:
    """Ratio of each contestant against the length of the window."""
    points: dict[str, dict[int, float]] = {}
    for group in record["groups"]:
        for name, figures in group["contestants"].items():
            if "ratio" in figures and group["case"]["network"].startswith("mlp"):
                points.setdefault(name, {})[group["case"]["accumulate_step"]] = figures["ratio"]["median"]
    counts = sorted({n for found in points.values() for n in found})
    rows = [(name, *(f"{found[n]:.2f}" if n in found else "" for n in counts)) for name, found in points.items()]
    return markdown([("x floor at N =", *map(str, counts)), *rows])


def ascend_table(group: dict, suite: str) -> str:
    """A group of the dry run as Markdown, in the order of the suite."""
    found = planned(group)
    lines = [("contestant", "bytes per parameter, smallest window", "held with large microbatches",
              "KiB per sample of the window", f"samples of a window in {DEVICE >> 30} GiB", "off the line")]
    for name, figures in found.items():
        fits = (DEVICE - figures["held"] * figures["parameters"]) / figures["per_sample"]
        lines.append((bold(name), f"{figures['per_parameter']:.1f}", f"{figures['held']:.1f}",
                      f"{figures['per_sample'] / 1024:.1f}", f"{fits:,.0f}", f"{figures['deviation']:.1%}"))
    case, parameters = group["case"], max((figures["parameters"] for figures in found.values()), default=0)
    return under(group, f"{case['network']}, {parameters:,} parameters, float32, {case['optimizer']}; "
                        f"{case['accumulate_step']} microbatches a window.", lines)


def planned(group: dict) -> dict[str, dict]:
    """The figures of a group of the dry run, by name, of who has any."""
    return {name: figures for name, figures in group["contestants"].items() if "peaks" in figures}


# --- the figures ------------------------------------------------------------------------------------------------------


def draw_ascend(groups: list[dict], file: Path) -> None:
    """Draw bytes per parameter, and bytes per sample over the undivided batch's, of who is in all groups."""
    found = [planned(group) for group in groups]
    names = [name for name in found[0] if all(name in here for here in found)]
    figure, axes = plt.subplots(2, 1, figsize=(9, 6.4), sharex=True, layout="constrained")
    colours = plt.get_cmap("tab20c").colors
    for place, name in enumerate(names):
        at = (place + 1) / (len(names) + 1) - 0.5
        heights = [[here[name]["per_parameter"] for here in found],
                   [here[name]["per_sample"] / here["undivided"]["per_sample"] for here in found]]
        colour = colours[4 + place % 4 if name.startswith("ms_accum") else place % 4]
        for axis, height, digits in zip(axes, heights, ("%.0f", "%.2f")):
            bars = axis.bar([i + at for i in range(len(groups))], height, 1 / (len(names) + 1), color=colour,
                            label=name.replace("-pieces", ", 8 pieces"))
            axis.bar_label(bars, fmt=digits, fontsize=6)
    axes[0].set_ylabel("bytes per parameter,\nsmallest window")
    axes[1].set_ylabel("bytes per sample\n/ the undivided batch's")
    axes[1].set_xticks(range(len(groups)), [group["name"] for group in groups])
    axes[0].legend(ncols=6, fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw(found: list[dict], file: Path) -> bool:
    """Draw a panel for each network, a point for each contestant. Return whether there is anything to draw."""
    groups = [group for record in found if record["suite"] == "strategies"
              for group in record["groups"] if points(group)]
    if not groups:
        return False
    figure, axes = plt.subplots(1, len(groups), figsize=(5 * len(groups), 4.6), squeeze=False, layout="constrained")
    for axis, group in zip(axes.flat, groups):
        draw_points(axis, group)
    figure.supxlabel("time per microbatch / the tutorial's class (left is faster)")
    figure.supylabel("growth of peak memory / undivided batch's")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return True


def points(group: dict) -> dict[str, tuple[dict, dict]]:
    """Spreads of time and memory by name, of who has both; empty if the tutorial or the undivided batch failed."""
    contestants = group["contestants"]
    whole = contestants.get("undivided", {}).get("growth_spread")
    if group["base"] != "tutorial" or whole is None:
        return {}
    return {name: (figures["ratio"], {key: value / whole["median"] for key, value in figures["growth_spread"].items()})
            for name, figures in contestants.items() if "ratio" in figures and "growth_spread" in figures}


def draw_points(axis: Axes, group: dict) -> None:
    """A point with whiskers for the quartiles, its name beside it, names apart from each other."""
    found = sorted(points(group).items(), key=lambda point: point[1][1]["median"])
    axis.margins(x=0.35, y=0.12)
    for name, (time, memory) in found:
        x_whisker, y_whisker = ([[s["median"] - s["q1"]], [s["q3"] - s["median"]]] for s in (time, memory))
        axis.errorbar(time["median"], memory["median"], xerr=x_whisker, yerr=y_whisker, marker="o",
                      color=OURS if name.startswith("ms_accum") else OTHERS, ecolor="0.7")
    axis.axvline(1, color="0.85", zorder=0)
    axis.set_title(f"{group['name'].partition(', cut')[0]}, microbatches of {group['case']['batch']}")
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    level = low
    for name, (time, memory) in found:
        level = max(level + (high - low) / 18, memory["median"])
        side, place = (1, "left") if 2 * time["median"] < left + right else (-1, "right")
        axis.annotate(name.replace("-pieces", ", 8 pieces"), (time["median"], memory["median"]),
                      (time["median"] + 0.03 * side * (right - left), level), fontsize=8, va="center", ha=place,
                      fontweight="bold" if name.startswith("ms_accum") else None,
                      arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6})


if __name__ == "__main__":
    main(sys.argv[1:])
