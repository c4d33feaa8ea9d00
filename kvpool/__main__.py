"""`python -m kvpool` is `kvpool`."""

from kvpool.cli.app import main

main()
