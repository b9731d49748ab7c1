"""Each trap of the page what-mindspore-does is still there. If not, MindSpore has changed: remove its section."""
import json
import re
from pathlib import Path

import mindspore as ms
import pytest
from support.pages import PAGES, blocks_of
from support.processes import run_python

PAGE = PAGES["what-mindspore-does"]
# Runs files one after the other, each with the names of those before. Graph mode reads the source of functions.
RUN = """
import contextlib, io, json, runpy, sys, traceback
names, printed = {}, []
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            names.update(runpy.run_path(path, names))
        except BaseException:
            traceback.print_exc(file=out)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def traps_of(page):
    """Return the text of each trap by its title. What all of them share comes first, without a title."""
    introduction, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    return {"": introduction} | dict(section.removeprefix("## ").split("\n", 1) for section in sections)


def changed(page):
    """Run the blocks of a page in one process. Return what some printed that is not as the page says, by title."""
    blocks = [(title, block) for title, text in traps_of(page).items() for block in blocks_of(text)]
    files = [f"block{number}.py" for number in range(len(blocks))]
    for file, (_, block) in zip(files, blocks):
        Path(file).write_text(block.code, encoding="utf-8")
    printed = json.loads(run_python(RUN, *files).splitlines()[-1])
    return {title: text for (title, block), text in zip(blocks, printed, strict=True)
            if not block._replace(printed=block.printed or "").agrees(text)}


@pytest.mark.slow
@pytest.mark.skipif(tuple(map(int, ms.__version__.split(".")[:2])) < (2, 10), reason="the page is about MindSpore 2.10")
def test_mindspore_still_does_what_the_page_says(monkeypatch):
    """By default, that is, without the variable that `avoid_busy_waiting` sets."""
    monkeypatch.delenv("MS_DEV_HOST_BLOCKING_RUN", raising=False)
    assert changed(PAGE) == {}


def test_each_trap_has_a_block_that_prints():
    _, *traps = traps_of(PAGE).items()
    assert len(traps) == 7
    for title, text in traps:
        assert [block for block in blocks_of(text) if block.printed], title


TRAP = """## {}

```python
{}
```

It prints:

```text
2
```

"""


def test_a_change_and_an_error_are_seen():
    page = "".join(TRAP.format(*trap) for trap in (
        ("same", "two = 2\nprint(two)"), ("other", "print(two + 1)"), ("error", "print(three)")))
    assert {title: text.splitlines()[-1] for title, text in changed(page).items()} == {
        "other": "3", "error": "NameError: name 'three' is not defined"}


CACHED = """
import sys
import mindspore as ms
ms.set_context(enable_compile_cache=True, compile_cache_path=sys.argv[1])
weight = ms.Parameter(ms.Tensor(1.0), name="weight")
@ms.jit
def add(x):
    return ms.ops.assign_add(weight, x) * 2
add(ms.Tensor(1.0))
print(float(weight))
"""


def test_a_compiled_function_of_the_cache_on_disk_has_parameters_of_its_own(tmp_path):
    """So the page on train steps says. Control: the first run, which fills the cache."""
    assert [run_python(CACHED, str(tmp_path / "cache")).split()[-1] for _ in range(2)] == ["2.0", "1.0"]
