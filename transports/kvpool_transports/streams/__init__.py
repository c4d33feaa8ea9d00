"""For transports over byte streams."""
