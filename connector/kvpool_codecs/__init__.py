"""Codecs: blocks that are smaller in the pool than in the engine.

It knows no connector. Without it engines save and load blocks as they are.
"""
