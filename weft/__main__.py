"""`python -m weft` is `weft`."""

from weft.cli import main

main()
