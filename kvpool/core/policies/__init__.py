"""Policies beside LRU: which block goes next. Each is chosen by its name (`server.policy`)."""
