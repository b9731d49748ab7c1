"""Compile cases on MindSpore's Ascend backend, without a device: passes run, memory is planned, nothing launched."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from support.ascend.stand_ins import variables

FUSION = "--enable_pass=matmul_assignadd_fusion"


class Node(NamedTuple):
    """An operator of a graph."""

    name: str
    inputs: list  # nodes, or texts for what no operator made (`%para3_fc.weight`)
    group: str  # of a collective: the ranks that take part


class Report(NamedTuple):
    """What a case was compiled to."""

    graphs: list  # the nodes of each graph after the last pass
    numbers: dict  # what the case returned

    def __repr__(self):
        """Return a text that ends: the one of nodes would hold each as often as there are ways to it."""
        return f"<{len(self.graphs)} graphs, {self.numbers}>"


def dry_run(cann, folder, cases, fusion, ranks, in_place):
    """Compile cases in one process, unless `folder` holds its reports. Return by name a Report, or an error's text.

    The stand-ins are in `cann`. With `fusion`, MindSpore's pass adds a weight's gradient in the matrix product. The
    collectives are compiled for so many ranks. With `in_place`, the environment chooses the kernels that work in place,
    which a dry run cannot prove: all values are 0.
    """
    reports, told = {}, folder / "reports"
    if not told.exists():
        (folder / "ir").mkdir(parents=True)
        with told.open("w") as out, (folder / "errors").open("w") as errors:
            command = [sys.executable, Path(__file__).with_name("cases.py"), folder / "ir", *cases]
            switch = {"MS_ACCUM_IN_PLACE": "1"} if in_place else {}
            subprocess.run(command, cwd=folder, stdout=out, stderr=errors, timeout=1800, check=False,
                           env={**environment(cann, folder, fusion, ranks), **switch})
    for line in told.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            case = json.loads(line)
            graphs = [*map(read_graph, map(Path, case["files"]))]
            reports[case["case"]] = case.get("error") or Report(graphs, case["numbers"])
    missing = set(cases).difference(reports)
    assert not missing, f"{missing} ended without a report:\n{(folder / 'errors').read_text(encoding='utf-8')[-4000:]}"
    return reports


def environment(cann, folder, fusion, ranks):
    """Return the environment of a dry run."""
    tests = Path(__file__).parents[2]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    return {
        **plain, **variables(cann), "RANK_SIZE": str(ranks), "RANK_ID": "0",
        "OMP_NUM_THREADS": "1", "MS_DEV_SAVE_GRAPHS": "2",
        "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "ir"), "MS_DEV_DUMP_IR_PASSES": "graph_build",
        "MS_DEV_GRAPH_KERNEL_FLAGS": FUSION if fusion else "",
        "PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests, cann / "python")))}


def read_graph(file):
    """Return the nodes of a graph that MindSpore wrote down."""
    nodes = {}
    operators = r'^ *(%\d+)\(.*?\) = (?:PrimFunc_)?(\w+)\((.*?)\)(?: |$)(?:.* group: "(.*?)")?'
    for number, name, arguments, group in re.findall(operators, file.read_text(encoding="utf-8"), re.MULTILINE):
        nodes[number] = Node(name, [nodes.get(text, text) for text in arguments.split(", ")], group)
    return list(nodes.values())


def behind(node):
    """Return a node without the nodes before it that launch nothing; in an arm of a branch, what the branch was given.
    """
    while isinstance(node, Node):
        if node.name in ("Load", "Depend"):
            node = node.inputs[0]
        elif node.name == "TupleGetItem" and node.inputs[0].name == "ConditionSwitch":
            node = node.inputs[0].inputs[1 + int(node.inputs[1][4:-1])]  # I64(0)
        else:
            break
    return node
