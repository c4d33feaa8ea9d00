"""What the connector's parts tell each other: plain values.

The scheduler half and the worker half of one engine send each other messages; the planner is given
events and returns plans; an engine promises blocks to another one; a block carries who wrote it.
Nothing here does I/O, and everything else may import it.
"""
