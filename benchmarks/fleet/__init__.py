"""A fleet of engines over a pool, in virtual time: what a pool does to hundreds of GPUs.

The pool is the code of the product (directory, stores, policies, hints, placement), and so is the
engine's decision to load or to compute (the connector's planner). Engines, links and clients are a
cost model whose constants are listed with their sources (`constants.py`).
"""
