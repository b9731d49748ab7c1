"""Say whether accumulation is exact for a network, and what prevents it. The command line may import it."""
