"""Whether accumulation is exact for a network, and which layers and losses keep it from being so."""
