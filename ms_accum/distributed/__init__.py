"""Ranks: how the gradients or the updates of several become one."""
from .local import LocalUpdates as LocalUpdates
