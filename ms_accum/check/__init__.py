"""Check whether accumulation is exact for a network, and name what prevents it. The command line may import it."""
