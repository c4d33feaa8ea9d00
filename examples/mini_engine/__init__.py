"""A teaching engine on a CPU, behind a kvpool: docs/write-a-connector.md explains it."""
