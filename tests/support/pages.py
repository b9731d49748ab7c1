"""The pages of the guide, and the names that the API reference has to hold."""
import inspect
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
