"""What the connectors of SGLang, LMCache and transformers have in common."""
