"""Find how large a microbatch fits, and how large a batch is worth it."""
