"""What the connectors of all engines have in common: settings, a pool beside the engine's thread,
names of sessions and of what engines share. It knows none of them.
"""
