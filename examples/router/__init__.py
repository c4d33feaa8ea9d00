"""A teaching router in front of engines that share a kvpool: docs/fleet.md explains it."""
