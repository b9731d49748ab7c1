"""Save and load the state of the last update of a training."""
