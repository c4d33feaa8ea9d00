"""The scheduler half's decisions: what to look up, load, save and compare, and when.

All of it is pure: it knows no engine, clock, socket or randomness; `now` is in seconds of any one
clock. `planner.py` is the way in; the other files are what it consists of.
"""
