"""The scheduler half: reports what happens in an engine to the plan, and carries out what it says.

One in an engine, in its scheduling loop, which it never makes wait. It knows no engine's classes.
"""
