"""Save and load everything that training consists of, also in the middle of a window. Examples may import it."""
