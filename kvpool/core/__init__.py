"""kvpool core: pure bookkeeping. No asyncio, no clock, no randomness, no I/O."""
