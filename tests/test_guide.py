"""The guide: it builds, its scripts run and print what it says, and what it says about the repository is true."""
import inspect
import json
import re
import runpy

import pytest
from conftest import run_python
from pages import PAGES, PUBLIC, ROOT, TUTORIALS

from ms_accum import Accumulator


def test_the_guide_is_short_and_its_first_page_has_readmes_table():
    """Words without the bars of tables. The links of the table lead to the same pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(r"^## Which call for me\?\n\n((?:\|.*\n)+)", readme, re.MULTILINE)[1]
    assert table.replace("(tutorials/", "(") in PAGES["index"]
    pages = [name for name in PAGES if name not in ("api", "cli")]
    assert len(pages) <= 14
    assert sum(len(PAGES[name].replace("|", " ").split()) for name in pages if name != "changelog") <= 13_000


# --- the scripts ----------------------------------------------------------------------------------------------------------

EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\n(It prints(?:, for example)?):\n\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
SCRIPTS = {name: EXAMPLE.findall(text) for name, text in PAGES.items() if "```python" in text}
RUNNER = """
import contextlib, io, json, os, runpy, sys
import mindspore as ms
printed = {}
for path in sys.argv[1:]:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    name = os.path.basename(path)[:-3]
    os.makedirs(name + "_files")
    os.chdir(name + "_files")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name=name)
    os.chdir("..")
    printed[name] = out.getvalue()
print(json.dumps(printed))
"""
END = "--- end of block {} ---\n"
ANOTHER_LIBRARY = re.compile(r"^from mind(?:one|cv|yolo|ocr)\b", re.MULTILINE)  # their blocks: tests/test_other_libraries.py


def script(name):
    """Return the blocks of a page as one script that prints where each block ends, and what else is tested of the page."""
    blocks = [("" if ANOTHER_LIBRARY.search(code) else code) + f"print({END.format(i)[:-1]!r})\n"
              for i, (code, _, _) in enumerate(SCRIPTS[name])]
    return "".join(blocks) + ("\n".join(replacements()) if name == "other-libraries" else "")


def replacements():
    """The code in the last column of the table of other-libraries.md."""
    rows = [row.split("|") for row in PAGES["other-libraries"].splitlines() if row.startswith("| ") and row.count("|") == 4]
    assert len(rows) == 10
    lines = [line for row in rows[1:] for line in re.findall(r"`([^`]+)`", row[3]) if line not in ("loss / 4", "sync_gradients")]
    assert len(lines) > 10
    return lines


def comparable(text, exact):
    """Printed text; of an example, without its figures and what follows them on lines that list parameters."""
    lines = [line.rstrip() for line in text.rstrip("\n").splitlines()]
    if exact:
        return lines
    return [re.sub(r"[\d.]+e[+-]\d\d", "#", line) for line in lines if not line.startswith(("largest", "beyond"))]


def test_every_block_and_every_output_is_found_and_compared():
    for name, text in PAGES.items():
        blocks = SCRIPTS.get(name, [])
        assert len(blocks) == text.count("\n```python\n"), name
        assert sum(bool(marker) for _, marker, _ in blocks) == text.count("\nIt prints"), name
    assert comparable("1.0 2\n", True) != comparable("1.0 3\n", True)
    assert comparable("a 1.0e-01 b\n", False) == comparable("a 2.0e-01 b\n", False) != comparable("a 2.0e-01 c\n", False)


def test_the_scripts_of_all_pages_run_and_print_what_the_pages_say(tmp_path):
    """One process runs all pages, from files, because graph mode reads the source of functions."""
    for name in SCRIPTS:
        (tmp_path / f"{name}.py").write_text(script(name), encoding="utf-8")
    printed = json.loads(run_python(RUNNER, *(str(tmp_path / f"{name}.py") for name in SCRIPTS)).splitlines()[-1])
    compared = 0
    for name, rest in printed.items():
        for i, (_, marker, expected) in enumerate(SCRIPTS[name]):
            said, rest = rest.split(END.format(i), 1)
            if marker:
                exact = marker == "It prints"
                assert comparable(said, exact) == comparable(expected, exact), f"{name}.md, block {i}"
                compared += 1
    assert compared >= 10


# --- what the pages say about the repository ------------------------------------------------------------------------------


def signature(function):
    """Return a function's name and parameters as the reference page writes them."""
    parts = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if p.default is p.empty else "=" + repr(p.default).replace("'", '"')
        parts.append(("**" if p.kind is p.VAR_KEYWORD else "") + p.name + default)
    return f"{function.__name__}({', '.join(parts)})"


def test_signatures_are_the_real_ones():
    block = re.search(r"^## Signatures\n.*?^```text\n(.*?)^```", PAGES["api"], re.MULTILINE | re.DOTALL)[1]
    text = " ".join(block.split())
    shown = [value for name, value in PUBLIC.items() if re.search(rf"\b{name.rpartition('.')[2]}\(", block)]
    assert len(shown) > 15
    for value in shown:
        assert signature(value) in text
    for name in ("add", "close_if", "apply", "flush", "reset"):
        assert signature(getattr(Accumulator, name)).replace("(self, ", "(").replace("(self)", "()") in text


def test_guarantees_name_tests_that_exist():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    named = re.findall(r"`(test_\w+)(…?)`", PAGES["limits"])
    assert len(named) > 10
    assert [name for name, rest in named if not any(f"def {name}{'' if rest else '('}" in source for source in sources)] == []


@pytest.mark.parametrize("name", sorted(PAGES))
def test_files_in_code_spans_exist(name):
    prose = re.sub(r"^```.*?^```$", "", PAGES[name], flags=re.MULTILINE | re.DOTALL)
    paths = re.findall(r"`((?:tests|tutorials|ms_accum|\.ci)/[\w/.-]*)`", prose)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert paths or name not in ("limits", "benchmarks", "contributing")


def test_the_layout_is_true():
    tree = re.search(r"^## Layout\n+```text\n(.*?)^```", PAGES["contributing"], re.MULTILINE | re.DOTALL)[1]
    named, folder = set(), ""
    for line in tree.splitlines():
        name = line.split()[0]
        folder = name if not line.startswith(" ") else folder
        named.add(name if folder == name else folder + name)
    assert [name for name in named if not (ROOT / name).exists()] == []
    folders = {f"{top}/{path.name}/" for top in ("ms_accum", "tests", "tutorials") for path in (ROOT / top).iterdir()
               if path.is_dir() and not path.name.startswith(("_", ".")) and any(path.iterdir())}
    assert folders - {"tests/__pycache__/"} <= named


def test_the_command_line_is_what_help_prints(monkeypatch):
    """After a change: python tutorials/reference/cli.py"""
    monkeypatch.setenv("COLUMNS", "100")
    assert PAGES["cli"] == runpy.run_path(str(TUTORIALS / "reference" / "cli.py"))["text"]()
