"""README, the guide and docstrings: their code prints what they say, and what they say of the repository is true."""
import importlib
import inspect
import pkgutil
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from support.pages import (
    EXCEPTIONS,
    PAGES,
    PUBLIC,
    README,
    ROOT,
    TUTORIALS,
    Block,
    blocks_of,
    docstring_block,
    run_blocks,
)
from support.processes import run_python

import ms_accum
from ms_accum import Accumulator, TrainOneStepCell, make_train_step
from ms_accum.core.accumulator import HandOptions, Options

# --- what runs --------------------------------------------------------------------------------------------------------

# What MindSpore does is in test_what_mindspore_does.py: its blocks leave MindSpore with errors. The code of Chinese
# pages is that of the English ones (test_chinese.py).
SCRIPTS = {name: blocks_of(text) for name, text in PAGES.items()
           if "```python" in text and name != "what-mindspore-does" and not name.endswith("-cn")}
# Their blocks are in test_other_libraries.py.
ANOTHER_LIBRARY = re.compile(r"^from mind(?:one|cv|yolo|ocr)\b", re.MULTILINE)
TABLE = re.search(r"^## Which call for me\?\n\n((?:\|.*\n)+)", README, re.MULTILINE)[1]
FRONT = ("README", "resumed", "first-hour")
OTHERS = ("docstrings", "language-models", "other pages")
NEEDED = """
from mindspore.train import Model
from ms_accum import Accumulator, FlushCallback, TrainOneStepCell, make_grad_cache_step
network_with_loss = nn.WithLossCell(network, loss_fn)
encode_fn = network
def built(step):
    assert step is not None
"""


def calls_of_readmes_table():
    """The calls of its second column, after what the first hour's script makes before it trains."""
    cells = [cell for row in TABLE.splitlines()[2:] for cell in re.findall(r"`([^`]+)`", row.split("|")[2])]
    calls = [cell for cell in cells if re.match(r"(make_|Accumulator|FlushCallback|Model)", cell)]
    assert len(calls) == 5
    made = blocks_of(PAGES["first-hour"])[0].code.split("train_step = ")[0]
    return Block(made + NEEDED + "\n".join(f"built({call})" for call in calls))


def readmes_diff():
    """Its lines before and after, each with what it needs: with ms_accum, 10 microbatches are 3 updates."""
    lines = re.search(r"^```diff\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1].splitlines()
    assert {line[:1] for line in lines} == {" ", "-", "+", ""}
    needed = SCRIPTS["train-step"][0].code.split("def forward_fn")[0]
    needed += "import mindspore\noptimizer = nn.SGD(network.trainable_params(), learning_rate=0.1)\n"
    return {f"readme_diff_{name}": [
        Block(needed + "\n".join(line[1:] for line in lines if not line.startswith(other))),
        Block("print(int(optimizer.global_step))", updates)]
        for name, other, updates in (("before", "+", "10\n"), ("after", "-", "3\n"))}


def resumed():
    """The script of the first hour, stopped after an epoch and started again, twice. At the end nothing is left."""
    script = blocks_of(PAGES["first-hour"])[0]
    first, *others = script.printed.splitlines(keepends=True)
    return [Block(script.code.replace("EPOCHS = 3", "EPOCHS = 1"), first), Block(script.code, "".join(others)),
            Block(script.code, "")]


def replacements():
    """The calls in the last column of the tables of other-libraries.md."""
    rows = re.findall(r"^\|.*\|$", PAGES["other-libraries"], re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", " ".join(row.rsplit("|", 2)[1] for row in rows))
    calls = [span if re.match("make|Train|Data", span) else f"dict({span})" for span in spans]
    assert len(calls) >= 8
    needed = "from ms_accum import DataParallel, TrainOneStepCell, by_epoch\n"
    needed += "net_with_loss = nn.WithLossCell(network, loss_fn)\n"
    return Block(needed + "\n".join(calls))


def scripts_of(process):
    """`{name: blocks}` of the scripts that a process runs."""
    if process == "docstrings":
        documented = [name for name in PUBLIC if name not in (*EXCEPTIONS, "ms_accum.batch_size.plan_micro_batch")]
        return {f"doc_{name.replace('.', '_')}": [docstring_block(name)] for name in documented}
    if process == "README":
        assert not blocks_of(README)
        return {**readmes_diff(), "readme_table": [calls_of_readmes_table()]}
    if process == "resumed":
        return {"first_hour_resumed": resumed()}
    names = [process] if process in SCRIPTS else [name for name in SCRIPTS if name not in (*FRONT, *OTHERS)]
    scripts = {name: [block for block in SCRIPTS[name] if not ANOTHER_LIBRARY.search(block.code)] for name in names}
    if "other-libraries" in scripts:
        scripts["other-libraries"].append(replacements())
    return scripts


def wrong_in(process):
    """What blocks print that do not print what the page says."""
    scripts = scripts_of(process)
    printed = run_blocks(scripts)
    return {name: said for name, blocks in scripts.items()
            for block, (said, _) in zip(blocks, printed[name], strict=True) if not block.agrees(said)}


@pytest.mark.parametrize("process", [
    "README", "first-hour", pytest.param("resumed", marks=pytest.mark.slow)])
def test_every_block_of_the_front_pages_prints_what_it_says(process):
    assert wrong_in(process) == {}


@pytest.mark.usefixtures("compiled_if_slow")
@pytest.mark.parametrize("process", OTHERS)
def test_every_block_of_other_pages_and_docstrings_prints_what_it_says(process):
    """Their graphs take minutes to compile."""
    assert wrong_in(process) == {}


def test_every_page_is_run():
    scripts = [scripts_of(process) for process in (*FRONT, *OTHERS)]
    assert {name for names in scripts for name in names} > SCRIPTS.keys()
    assert sum(block.printed is not None for each in scripts for blocks in each.values() for block in blocks) >= 30


@pytest.mark.slow  # three processes that fill gigabytes, and run the main script, too
def test_the_example_of_planning_runs():
    block = docstring_block("ms_accum.batch_size.plan_micro_batch")
    assert block.agrees(run_python(block.code))


def test_every_block_and_every_output_is_found_and_compared():
    for name, text in {**PAGES, "README": README}.items():
        blocks = blocks_of(text)
        assert len(blocks) == text.count("\n```python\n"), name
        said = re.findall("^(?:It prints|输出).*$(?=\n\n```text)", text, re.MULTILINE)
        assert sum(block.printed is not None for block in blocks) == len(said), name
    assert not Block("", "1.0 2\n").agrees("1.0 3\n")
    assert Block("", "a 1.0e-01 b\n", example=True).agrees("a 2.0e-01 b\n")
    assert not Block("", "a 1.0e-01 b\n", example=True).agrees("a 2.0e-01 c\n")


def test_the_pictures_are_what_the_script_draws(monkeypatch, capsys, tmp_path):
    """Of a run whose parameter moves at the last microbatch of each window. The lengths of bars are not compared."""
    monkeypatch.syspath_prepend(TUTORIALS)
    monkeypatch.setattr(sys, "argv", ["draw.py", str(tmp_path)])
    importlib.import_module("draw").main()
    assert capsys.readouterr().out == "the parameter moved at microbatches 4, 8, 11\n"
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert drawn.keys() == {path.name for path in (TUTORIALS / "figures").iterdir()}
    for name, text in drawn.items():
        stored = (TUTORIALS / "figures" / name).read_text(encoding="utf-8")
        assert re.findall(r">([^<]+)</text>", text) == re.findall(r">([^<]+)</text>", stored), name
        assert "prefers-color-scheme: dark" in text
        assert sum(f"figures/{name}" in page for page in (README, *PAGES.values())) >= 1
    assert drawn["window.svg"].count("empty") == 3


# --- what they say about the repository -------------------------------------------------------------------------------


def test_readme_and_the_guide_are_short_and_the_index_repeats_no_line_of_readmes_table():
    """In words of `wc -w`, also those of the Chinese pages. The index leads to the same pages as README's table."""
    assert len(README.splitlines()) <= 110
    assert not set(TABLE.splitlines()[2:]) & set(PAGES["index"].replace("(guide/", "(tutorials/guide/").splitlines())
    assert set(re.findall(r"\(tutorials/(guide/[\w-]+\.md)", TABLE)) <= set(re.findall(r"\((\S+?)[#)]", PAGES["index"]))
    counted = [ROOT / "README.md", *TUTORIALS.glob("*.md"), *TUTORIALS.glob("guide/*.md")]
    words = {path.stem: len(path.read_text(encoding="utf-8").split()) for path in counted}
    assert len([name for name in words if not name.lower().endswith(("-cn", "_cn"))]) <= 17
    assert sum(words.values()) <= 14_000
    most = {"README": 620, "contract": 700, "first-hour": 1_000, "changelog": 1_200, "what-mindspore-does": 600}
    assert {name: words[name] for name in most if words[name] > most[name]} == {}


def test_first_errors_are_those_of_the_package():
    """The words that the page quotes stand in the package, but for one of MindSpore's."""
    quoted = re.findall(r'^\| "(.+?)" \|', PAGES["first-hour"], re.MULTILINE)
    assert len(quoted) == 5
    text = "\n".join(path.read_text(encoding="utf-8") for path in Path(ms_accum.__file__).parent.rglob("*.py"))
    text = re.sub(r'"\n\s*f?"', "", text)  # of strings over several lines
    assert [words for words in quoted if words not in text] == ["temporary source code in terminal"]


def test_public_names_and_modules_are_documented():
    for name in PUBLIC.keys() - set(EXCEPTIONS):
        assert {"Example:", "Source:"} <= set(inspect.getdoc(PUBLIC[name]).split()), name
        assert PUBLIC[name].__module__.startswith("ms_accum.")
    modules = [m.name for m in pkgutil.walk_packages(ms_accum.__path__, "ms_accum.") if not m.name.endswith("__main__")]
    assert "ms_accum.core.accumulator" in modules
    assert all(importlib.import_module(m).__doc__ for m in modules)


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
    assert len(shown) >= 15
    for value in shown:
        assert signature(value) in text
    for name in ("add", "close", "close_if", "flush", "reset"):
        assert signature(getattr(Accumulator, name)).replace("(self, ", "(").replace("(self)", "()") in text


def lost_anchors(pages):
    """The links of pages, by path, to a heading that GitHub does not show: it makes no pages of docstrings."""
    shown = {path: re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL) for path, text in pages.items()}
    headings = {path: {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(
        r"^#+ (.*)$", text, re.MULTILINE)} for path, text in shown.items()}
    links = [(path, *link) for path, text in shown.items() for link in re.findall(r"\]\(([^):]*)#([^)]+)\)", text)]
    return [f"{file}#{anchor}" for path, file, anchor in links
            if anchor not in headings.get((path.parent / file).resolve() if file else path, ())]


def test_links_to_headings_work_in_the_repository():
    """`test_site.py` looks at those of the site. Control: a heading that only the site has."""
    paths = [ROOT / "README.md", *TUTORIALS.rglob("*.md")]
    pages = {path: path.read_text(encoding="utf-8") for path in paths}
    assert sum(text.count(".md#") for text in pages.values()) > 50
    assert lost_anchors(pages) == []
    index = TUTORIALS / "index.md"
    pages[index] += "[a stage](reference/names.md#ms_accum.Stage)"
    assert lost_anchors(pages) == ["reference/names.md#ms_accum.Stage"]


def test_files_in_code_spans_exist():
    for name, page in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
        paths = re.findall(r"`((?:tests|tutorials|ms_accum|\.ci)/[\w/.-]*)`", prose)
        assert [path for path in paths if not (ROOT / path).exists()] == [], name
        assert paths or name not in ("benchmarks", "contributing")


def test_the_command_line_is_what_help_prints(monkeypatch):
    """After a change: python tutorials/reference/cli.py"""
    monkeypatch.setenv("COLUMNS", "100")
    assert PAGES["cli"] == runpy.run_path(str(TUTORIALS / "reference" / "cli.py"))["text"]()


def test_ci_runs_the_readmes_test_command_on_the_versions_of_the_matrix():
    assert len(re.findall(r"^python3 -m venv .*pytest.*$", README, re.MULTILINE)) == 1
    assert "grep -m1 '^python3 -m venv .*pytest' README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    pairs = runpy.run_path(str(ROOT / "tests" / "matrix"))["PAIRS"]
    assert re.findall(r'mindspore: "(.+?)", python: "(.+?)"', workflow) == pairs


def test_the_scheduled_job_runs_every_slow_test_once_the_whole_matrix_and_mutations():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "slow.yml").read_text(encoding="utf-8"))["jobs"]
    paths = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    parts = {part: part.replace("--ignore=", "").split() for part in jobs["slow"]["strategy"]["matrix"]["part"]}
    runs = Counter(path for root, *ignored in parts.values() for path in paths
                   if path.is_relative_to(root) and not any(map(path.is_relative_to, ignored)))
    assert runs == Counter(paths)
    assert all((ROOT / path).exists() for named in parts.values() for path in named)
    commands = {name: job["steps"][-1]["run"] for name, job in jobs.items()}
    assert "pytest -n 1 -m slow ${{ matrix.part }}" in commands["slow"]
    assert commands["matrix"] == "tests/matrix --only ${{ matrix.mindspore }}"
    pairs = runpy.run_path(str(ROOT / "tests" / "matrix"))["PAIRS"]
    assert set(jobs["matrix"]["strategy"]["matrix"]["mindspore"]) == {mindspore for mindspore, _ in pairs}
    pythons = next(step["with"]["python-version"] for step in jobs["matrix"]["steps"] if "with" in step)
    assert set(pythons.split()) == {python for _, python in pairs}
    assert "tests/mutate --seed ${{ github.run_number }}" in commands["mutate"]


def places_of_an_option():
    """The places that contributing.md lists, but for the last two, each with its text."""
    listed = re.search(r"^An option of `Accumulator`.*\n\n((?:- .*\n)+)", PAGES["contributing"], re.MULTILINE)[1]
    places = [re.match(r"- `(.+?)`", line)[1] for line in listed.splitlines()][:-2]
    return {place: "\n".join(path.read_text(encoding="utf-8") for path in (
        sorted((ROOT / place).glob("*.md")) if place.endswith("/") else [ROOT / place])) for place in places}


def places_without(option, places):
    return [place for place, text in places.items() if not re.search(rf"\b{option}\b", text)]


def test_each_option_of_an_accumulator_is_in_the_places_that_the_checklist_names():
    places = places_of_an_option()
    assert len(places) == 4
    options = [*inspect.signature(Accumulator).parameters, *HandOptions.__annotations__]
    options.remove("options")
    missing = {option: places_without(option, places) for option in options}
    assert {option: where for option, where in missing.items() if where} == {}
    assert places_without("seed_of_the_buffers", places) == list(places)  # an option that nobody has written about


def test_a_train_step_and_a_cell_take_each_option_of_an_accumulator():
    """Their docstrings name what `Options` holds."""
    assert Options.__annotations__.keys() == {"clip_norm", *HandOptions.__annotations__}
    for function in (make_train_step, TrainOneStepCell):
        named = re.search(r"\*\*options: (.+?)\n\n", inspect.getdoc(function), re.DOTALL)[1]
        assert [name for name in Options.__annotations__ if f"`{name}`" not in named] == []
