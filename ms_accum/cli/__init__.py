"""The command `ms-accum`: a module for each subcommand; `mnist` and `lm` share `training`."""
