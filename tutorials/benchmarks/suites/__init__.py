"""What each suite compares, and how; a file for each."""
from __future__ import annotations

from . import ascend, distributed, first_calls, memory, mlp, options, scaling, strategies

SUITES = {module.__name__.rpartition(".")[2]: module.SUITE
          for module in (mlp, strategies, memory, scaling, options, distributed, first_calls, ascend)}
