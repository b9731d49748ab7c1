"""Ranks: how the gradients of several become one."""
