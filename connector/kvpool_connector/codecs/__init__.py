"""Codecs: blocks that are smaller in the pool than in the engine.

A folder of its own, which the connector knows at one joint (`form_choice.py`): without it engines
save and load blocks as they are.
"""
