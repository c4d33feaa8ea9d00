"""Agents and their requests, before they reach an engine: which conversation a request belongs to,
when that goes on, what it asks of the pool, and when its turn is.

It knows no engine and no block. The middlewares in front of an engine (`sessions.py` and
`admitting.py`, whose paths users write) and the router of the examples consist of it.
"""
