"""Batches in, losses out; the host decides when a window closes. The optional rooms and examples may import it."""
