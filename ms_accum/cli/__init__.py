"""The command `ms-accum`: one module for each subcommand."""
