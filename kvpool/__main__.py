"""`python -m kvpool` is `kvpool`."""

from kvpool.cli import main

main()
