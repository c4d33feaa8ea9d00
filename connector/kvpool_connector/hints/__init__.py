"""What the requests of an engine say about their conversation, and ask of the pool. Pure."""
