"""Contestants by name, and where to find them; no framework is imported before a contestant of it is built."""
from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

_MODULES = {
    "mindspore_": (
        "ms_accum", "ms_accum-pieces", "ms_accum-by-hand", "ms_accum-again", "ms_accum-sums", "ms_accum-weights",
        "ms_accum-budget", "ms_accum-noise-scale", "ms_accum-clip", "ms_accum-skip-window", "ms_accum-skip-microbatch",
        "undivided", "tutorial", "one-buffer", "boost", "parallel-nn", "mindcv", "wrong-denominator", "window",
        "microbatch"),
    "pytorch_": ("pytorch-eager", "pytorch-compiled"),
    "jax_": ("jax-multisteps", "jax-scan"),
}
MODULES = {name: module for module, names in _MODULES.items() for name in names}
PACKAGES = ("mindspore", "ms_accum", "mindcv", "torch", "jax", "optax")


def builder(name: str) -> Callable:
    """`(case) -> contestant`. Raises ModuleNotFoundError without its framework."""
    return import_module(f"contestants.{MODULES[name]}").CONTESTANTS[name]
