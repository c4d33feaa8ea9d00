"""For operators."""
