"""Check whether accumulation is exact for a network, and find the layers and losses that prevent it."""
