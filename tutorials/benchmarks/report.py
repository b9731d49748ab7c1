"""Make Markdown tables and figures from records of run.py, and from nothing else."""
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
# Records hold ways that are gone since: fused, in-step.
OURS = ("fused", "split", "in-step", "split-in-step", "bare", "reference")
HIGHLIGHT, PLAIN = "tab:orange", "tab:blue"
SHADES = {"undivided": "0.75", "tutorial": "#9ecae1", "boost": "#6baed6", "parallel-nn": "#2171b5", "split": "#fd8d3c",
          "split-in-step": "#d94801"}
MEBIBYTE = 2**20
# Memory of a device, to say what fits into it.
DEVICE = 64 * 2**30


def main(arguments: list[str]) -> None:
    """Print the tables, write them and the figures."""
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
    if not draw(found, options.output / "report.png"):
        print("report.py: no record of suite strategies with time and memory: no report.png", file=sys.stderr)
    for record in found:
        if record["suite"] == "ascend":
            draw_ascend(record, options.output / "ascend.png")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD", help="JSON files of run.py (default: all in records/)")
    parser.add_argument("--output", type=Path, default=RECORDS, metavar="DIR",
                        help="folder for report.md, report.png and ascend.png (default: records/)")
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
    made = (lambda suite, group: ascend_table(group)) if record["suite"] == "ascend" else table
    tables = [made(record["suite"], group) for group in record["groups"]]
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
    more, more_cells = MORE.get(suite, ((), lambda figures: ()))
    rows = [("contestant", *titles, base, "quartiles", "state / parameters", "difference", *more)]
    rows.append(("-",) * len(rows[0]))
    measured = {name: figures for name, figures in group["contestants"].items() if "spread" in figures}
    for name in sorted(measured, key=lambda name: measured[name]["spread"]["median"]):
        figures = measured[name]
        rows.append((f"**{name}**" if name in OURS else name, *cells(suite, group, figures), *ratio_cells(figures), state_cell(figures),
                     f"{figures['difference']:.0e}" if "difference" in figures else "", *more_cells(figures)))
    lines = ["|" + "|".join(row) + "|" for row in rows]
    absent = [f"- {name}: {figures['status']}: {figures['message']}"
              for name, figures in group["contestants"].items() if "message" in figures]
    rounds = max((len(figures["samples"]) for figures in measured.values()), default=0)
    case = ", ".join(f"{key} {value}" for key, value in group["case"].items())
    return "\n".join([f"### {group['name']}", "", f"{case}; {rounds} rounds.", "", *lines, "", *absent, ""])


def ascend_table(group: dict) -> str:
    """A group of the dry run as Markdown, in the order of the suite: for each what it takes, or why it was not measured."""
    found = planned(group)
    rows = [("contestant", "bytes per parameter, smallest window", "held with large microbatches", "KiB per sample of the window",
             f"samples of a window in {DEVICE >> 30} GiB", "off the line")]
    rows.append(("-",) * len(rows[0]))
    for name, figures in found.items():
        fits = (DEVICE - figures["held"] * figures["parameters"]) / figures["per_sample"]
        rows.append((f"**{name}**" if name in OURS else name, f"{figures['per_parameter']:.1f}", f"{figures['held']:.1f}",
                     f"{figures['per_sample'] / 1024:.1f}", f"{fits:,.0f}", f"{figures['deviation']:.1%}"))
    absent = [f"- {name}: {figures['message']}" for name, figures in group["contestants"].items() if "message" in figures]
    case, parameters = group["case"], max((figures["parameters"] for figures in found.values()), default=0)
    head = f"{case['network']}, {parameters:,} parameters, float32, {case['optimizer']}; {case['accumulate_step']} microbatches a window."
    return "\n".join([f"### {group['name']}", "", head, "", *("|" + "|".join(row) + "|" for row in rows), "", *absent, ""])


def planned(group: dict) -> dict[str, dict]:
    """The figures of a group of the dry run, by name, of who has any."""
    return {name: figures for name, figures in group["contestants"].items() if "peaks" in figures}


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


def strategy_cells(figures: dict) -> tuple[str, str, str]:
    """Seconds of the first window; growth of memory and its quartiles, where it was taken."""
    first = f"{figures['first_window']:.1f}" if "first_window" in figures else ""
    if "growth_spread" not in figures:
        return first, "", ""
    growth = {key: value / MEBIBYTE for key, value in figures["growth_spread"].items()}
    return first, f"{growth['median']:.0f}", f"{growth['q1']:.0f} to {growth['q3']:.0f}"


# Further columns of a suite: their titles, and `(figures of a contestant) -> cells`.
MORE = {
    "distributed": (("collectives a window", "KiB a window"), traffic_cells),
    "strategies": (("first window, s", "growth of peak RSS, MiB", "quartiles"), strategy_cells),
}


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


# --- figure ----------------------------------------------------------------------------------------------------------


def draw(found: list[dict], file: Path) -> bool:
    """Draw a panel for each network, a point for each contestant. Return whether there is anything to draw."""
    strategies = [record for record in found if record["suite"] == "strategies"]
    groups = [group for record in strategies for group in record["groups"] if points(group)]
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


def draw_ascend(record: dict, file: Path) -> None:
    """Draw bytes per parameter of the smallest window, and bytes per sample over the undivided batch's: bars for each network."""
    names = [name for name in dict.fromkeys(name for group in record["groups"] for name in planned(group)) if name in SHADES]
    figure, axes = plt.subplots(2, 1, figsize=(9, 6.4), sharex=True, layout="constrained")
    for place, name in enumerate(names):
        for at, group in enumerate(record["groups"]):
            found = planned(group)
            if name not in found:
                continue
            heights = [found[name]["per_parameter"]]
            if "undivided" in found:
                heights.append(found[name]["per_sample"] / found["undivided"]["per_sample"])
            for axis, height in zip(axes, heights):
                bars = axis.bar(at + (place + 1) / (len(names) + 1) - 0.5, height, 1 / (len(names) + 1), color=SHADES[name],
                                label=name if at == 0 else None)
                axis.bar_label(bars, fmt="%.0f" if axis is axes[0] else "%.2f", fontsize=6)
    axes[0].set_ylabel("bytes per parameter,\nsmallest window")
    axes[1].set_ylabel("bytes per sample\n/ the undivided batch's")
    axes[1].set_xticks(range(len(record["groups"])), [group["name"] for group in record["groups"]])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(ncols=6, fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(file, dpi=120)
    plt.close(figure)


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
                      color=HIGHLIGHT if name in OURS else PLAIN, ecolor="0.7")
    axis.axvline(1, color="0.85", zorder=0)
    axis.set_title(group["name"])
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    level = low
    for name, (time, memory) in found:
        level = max(level + (high - low) / 18, memory["median"])
        place = time["median"] + 0.03 * (right - left), level
        axis.annotate(name, (time["median"], memory["median"]), place,
                      fontsize=8, va="center", fontweight="bold" if name in OURS else None,
                      arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6})


if __name__ == "__main__":
    main(sys.argv[1:])
