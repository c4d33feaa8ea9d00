"""How bytes move between a client and a block server. Interchangeable, one module per scheme."""
