"""Object stores as cold tiers (design: cold)."""
