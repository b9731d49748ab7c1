"""`python -m ms_accum`, the same as `ms-accum`."""
import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
