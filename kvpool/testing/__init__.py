"""The kit for testing kvpool, and what plugs into it."""
