"""What the reference runs share: settings -> the loop over epochs and microbatches (train) -> figures.

A `Task` says what a run trains, on what, and how it is tested: see `ms_accum.mnist.train` and `ms_accum.lm.train`.
"""
