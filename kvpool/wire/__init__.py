"""Sans-IO: bytes to messages and back. Knows no socket, no clock, no loop."""
