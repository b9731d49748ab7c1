"""The train steps: batches in, losses out."""
