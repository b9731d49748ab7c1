"""Train steps: batches in, losses out; the host decides when a window closes. Optional rooms and examples use them."""
