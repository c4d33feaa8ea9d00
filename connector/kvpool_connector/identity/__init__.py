"""Which engines share blocks: those that compute the same KV.

An engine describes its model: weights by their fingerprints, configuration field by field, what of
its environment changes numbers. Of that, a namespace is made, as text that a person can compare.
"""
