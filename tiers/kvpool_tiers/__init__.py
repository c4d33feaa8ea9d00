"""The kinds of memory a block server can hold blocks in, one module each."""
