"""The command `ms-accum`: options, files, and the commands `check` and `plan`. Examples may import it."""
