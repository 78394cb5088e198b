"""`python -m treadle.serve MODEL ...` is `treadle serve MODEL ...`."""

import sys

from treadle.cli import main

main(["serve", *sys.argv[1:]])
