"""Pure."""
