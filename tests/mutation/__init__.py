"""Mutation tests: one-line mistakes in the product, and which of them the tests notice.

`make mutants` plants a random sample of mistakes, one at a time, in a copy of the tree, and runs
the tests that execute the changed line. A mistake that no test notices is a *survivor*: either
the tests miss a behaviour, or the change makes no difference.
"""
