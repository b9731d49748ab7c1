"""Compile cases on MindSpore's Ascend backend, without a device: every pass runs, memory is planned, no kernel is launched."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FUSION = "--enable_pass=matmul_assignadd_fusion"


class Node(NamedTuple):
    """An operator of a graph.

    Attributes:
        name: The operator.
        inputs: Nodes, or texts for what no operator made (`%para3_fc.weight`).
    """

    name: str
    inputs: list


class Report(NamedTuple):
    """What a case was compiled to.

    Attributes:
        graphs: The nodes of each graph after the last pass.
        numbers: What the case returned.
    """

    graphs: list
    numbers: dict


def dry_run(cann, folder, cases, flags="", ranks=1):
    """Run functions of `cases.py` in one process. Return a Report for each, or the text of its error, by name.

    Args:
        cann: Folder of the stand-ins.
        folder: An empty folder for the graphs.
        cases: Names of functions in `cases.py`.
        flags: For `MS_DEV_GRAPH_KERNEL_FLAGS`.
        ranks: Ranks that the collectives are compiled for.
    """
    here = Path(__file__).parent
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    environment = {
        **plain, "LD_LIBRARY_PATH": str(cann / "lib64"), "ASCEND_HOME_PATH": str(cann), "ASCEND_TOOLKIT_HOME": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"), "MS_SIMULATION_LEVEL": "1", "RANK_SIZE": str(ranks), "RANK_ID": "0", "OMP_NUM_THREADS": "1",
        "MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "ir"), "MS_DEV_DUMP_IR_PASSES": "graph_build",
        "MS_DEV_GRAPH_KERNEL_FLAGS": flags, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(cann / "python")])}
    run = subprocess.run([sys.executable, here / "cases.py", folder / "ir", *cases], cwd=folder, env=environment, capture_output=True,
                         text=True, timeout=600, check=False)
    reports = {}
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            reports[told["case"]] = told.get("error") or Report([read_graph(Path(f)) for f in told["files"]], told["numbers"])
    missing = set(cases).difference(reports)
    assert not missing, f"{missing} ended without a report:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    return reports


def read_graph(file):
    """Return the nodes of a graph that MindSpore wrote down."""
    nodes = {}
    operators = r"^ *(%\d+)\(.*?\) = (?:PrimFunc_)?(\w+)\((.*?)\)(?: |$)"
    for number, name, arguments in re.findall(operators, file.read_text(encoding="utf-8"), re.MULTILINE):
        nodes[number] = Node(name, [nodes.get(text, text) for text in arguments.split(", ")])
    return list(nodes.values())


def behind(node):
    """Return a node without the nodes before it that launch nothing."""
    while isinstance(node, Node) and node.name in ("Load", "Depend"):
        node = node.inputs[0]
    return node
