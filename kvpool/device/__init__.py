"""Work on blocks where they lie, on a device: checksums, gather and scatter.

Nothing here imports torch before it is called (design: layout).
"""
