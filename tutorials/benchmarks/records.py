"""What is kept of a run: circumstances, raw samples, and the medians and paired ratios drawn from them."""
from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles

PACKAGES = ("ms_accum", "mindspore", "numpy", "mindcv", "torch", "jax", "jaxlib", "optax")
FOLDER = Path(__file__).with_name("records")


def make(suite: str, quick: bool, command: str, groups: list[dict]) -> dict:
    """A record of groups that are `summarised`."""
    return {"suite": suite, "quick": quick, "command": command, **circumstances(), "groups": groups}


@cache
def circumstances() -> dict:
    """Date, commit, machine in numbers, versions, as at the first call: no names of machines, users or folders."""
    versions = {name: found for name in PACKAGES if (found := _version(name))}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if (status := _git("status", "--porcelain")) is None else bool(status),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), **versions},
    }


def summarised(group: dict) -> dict:
    """The group with `median`, quartiles and the ratio to the base, paired round by round, of whoever has samples."""
    base = group["contestants"].get(group["base"], {}).get("samples")
    for figures in group["contestants"].values():
        if figures.get("samples"):
            figures["spread"] = spread(figures["samples"])
            if base:
                figures["ratio"] = spread([sample / of_base for sample, of_base in zip(figures["samples"], base)])
    return group


def spread(samples: list[float]) -> dict[str, float]:
    """Median, quartiles, smallest and largest."""
    low, _, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return {"median": median(samples), "q1": low, "q3": high, "min": min(samples), "max": max(samples)}


def summary(record: dict, file: str | None) -> dict:
    """What the runner prints as its last line."""
    groups = {}
    for group in record["groups"]:
        found = group["contestants"]
        medians = {name: figures["spread"]["median"] for name, figures in found.items() if "spread" in figures}
        ratios = {name: round(figures["ratio"]["median"], 4) for name, figures in found.items() if "ratio" in figures}
        groups[group["name"]] = {
            "base": group["base"],
            "status": {name: figures.get("status") for name, figures in found.items()},
            "messages": {name: figures["message"] for name, figures in found.items() if "message" in figures},
            "medians": medians,
            "ratios": ratios,
            # Of a dry run: bytes per parameter of the smallest window, and per sample.
            "bytes": {name: [round(figures["per_parameter"], 2), round(figures["per_sample"])]
                      for name, figures in found.items() if "peaks" in figures},
        }
    return {"suite": record["suite"], "quick": record["quick"], "record": file, "groups": groups}


def write(record: dict, file: Path) -> None:
    """Write a record, creating its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> dict:
    """Read a record. Raises ValueError if the file is none."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no record of run.py ({type(error).__name__})") from error
    if not isinstance(record, dict) or not {"suite", "groups", "versions"} <= record.keys():
        raise ValueError(f"{file} is no record of run.py (no suite, groups and versions in it)")
    return record


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(FOLDER.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
