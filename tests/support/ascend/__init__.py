"""Dry runs on MindSpore's Ascend backend, with stand-ins for CANN."""
