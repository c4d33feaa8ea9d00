"""The NVMe tier."""

from kvpool_tiers.nvme.tier import Nvme

__all__ = ["Nvme"]
