"""Agents and their requests, before they reach an engine: which conversation a request belongs to,
when that goes on, and when its turn is.

It runs in the process of vLLM's API server, or of a router, and knows no engine and no block.
"""
