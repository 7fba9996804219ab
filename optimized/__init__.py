"""The fast twins: same file names and same mathematics as the oracles, in Triton and torch."""
