"""The pages of the guide, and the names that the API reference has to hold."""
import importlib
import inspect
import re
import sys
import tempfile
from functools import cache
from pathlib import Path

import ms_accum
from ms_accum import batch_size, distributed

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "tutorials"
PATHS = [TUTORIALS / "index.md", TUTORIALS / "changelog.md", *sorted(TUTORIALS.glob("guide/*.md")),
         *sorted(TUTORIALS.glob("reference/*.md"))]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in PATHS}
PUBLIC = {f"{door.__name__}.{name}": value for door in (ms_accum, batch_size, distributed) for name, value in vars(door).items()
          if inspect.isclass(value) or inspect.isfunction(value)}


_RECIPES = tempfile.TemporaryDirectory()


@cache
def recipe(page, name):
    """A class of the guide, from a file of its own: graph mode reads the source of what it compiles, and imports it."""
    code = re.search(rf"^class {name}.*?(?=^\S|^```)", PAGES[page], re.MULTILINE | re.DOTALL)[0]
    path = Path(_RECIPES.name) / f"recipe_of_{name}.py"
    path.write_text(f"import mindspore as ms\nfrom mindspore import Tensor, nn, ops\n\n{code}", encoding="utf-8")
    if _RECIPES.name not in sys.path:
        sys.path.append(_RECIPES.name)
    return getattr(importlib.import_module(path.stem), name)
