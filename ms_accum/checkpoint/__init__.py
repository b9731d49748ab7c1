"""Save and load all state of a training, also in the middle of a window. Examples may import it."""
