"""Make Markdown tables and figures from records of run.py, and from nothing else."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
import records
from suites import SUITES

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MEBIBYTE = 2**20
# Memory of a device, to say what fits into it.
DEVICE = 64 * 2**30


def main(arguments: list[str]) -> None:
    """Print the tables, write them and the figures."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD",
                        help="JSON files of run.py (default: those of all suites, in records/)")
    parser.add_argument("--output", type=Path, default=records.FOLDER, metavar="DIR",
                        help="folder for report.md and ascend.png (default: records/)")
    options = parser.parse_args(arguments)
    try:
        found = [records.read(file) for file in options.records or [records.FOLDER / f"{name}.json" for name in SUITES]]
    except ValueError as error:
        parser.exit(2, f"report.py: error: {error}\n")
    text = "\n".join(map(section, found))
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "report.md").write_text(text, encoding="utf-8")
    for record in found:
        if record["suite"] == "ascend":
            draw_ascend(record["groups"], options.output / "ascend.png")


# --- tables -----------------------------------------------------------------------------------------------------------


def section(record: dict) -> str:
    """A record as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    quick = " **A quick run: its figures say nothing.**" if record["quick"] else ""
    changed = " with uncommitted changes" if record["uncommitted_changes"] else ""
    commit = (record["commit"] or "unknown")[:12] + changed
    where = f"{record['cores']} cores, {record['memory_gib']} GiB, {record['machine']}; {versions}; commit {commit}"
    head = [f"## {record['suite']}", "", f"`{record['command']}`, {record['date'][:10]}; {where}.{quick}", ""]
    made = ascend_table if record["suite"] == "ascend" else table
    return "\n".join([*head, *map(made, record["groups"])])


def table(group: dict) -> str:
    """A group as Markdown: who was measured, in order of the median, then who was not, and why."""
    measured = {name: figures for name, figures in group["contestants"].items() if "spread" in figures}
    rounds = max((len(figures["samples"]) for figures in measured.values()), default=0)
    columns = {
        "ms per microbatch": lambda f: f"{f['spread']['median'] * 1e3:.3f}",
        f"x {group['base']}": lambda f: f"{f['ratio']['median']:.2f}",
        "quartiles": lambda f: f"{f['ratio']['q1']:.2f} to {f['ratio']['q3']:.2f}",
        "buffers / parameters": lambda f: f"{f['state_bytes'] / f['parameter_bytes']:.2f}",
        "first window, s": lambda f: f"{f['first_window']:.1f}",
        "growth of memory, MiB": lambda f: f"{f['growth'] / MEBIBYTE:.0f}",
        "collectives a window": lambda f: str(f["collectives"]),
        "KiB a window": lambda f: f"{f['collective_bytes'] / 1024:.1f}",
    }
    rows = [(name, [cell(make, measured[name]) for make in columns.values()])
            for name in sorted(measured, key=lambda name: measured[name]["spread"]["median"])]
    used = [i for i, title in enumerate(columns) if any(cells[i] for _, cells in rows)]
    lines = [["contestant", *(list(columns)[i] for i in used)]]
    lines += [[bold(name), *(cells[i] for i in used)] for name, cells in rows]
    case = group["case"]
    return under(group, f"{case['network']}, microbatches of {case['batch']}, {rounds} rounds.", lines)


def cell(make: object, figures: dict) -> str:
    """A cell; empty if the figures lack what it shows."""
    try:
        return make(figures)
    except KeyError:
        return ""


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


def ascend_table(group: dict) -> str:
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


# --- the figure -------------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    main(sys.argv[1:])
