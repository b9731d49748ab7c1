"""What each suite compares, and how; a file for each."""
from __future__ import annotations

from . import ascend, distributed, options, strategies

SUITES = {module.__name__.rpartition(".")[2]: module.SUITE
          for module in (strategies, options, distributed, ascend)}
