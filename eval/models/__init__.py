"""Models behind one interface: generate, score, describe."""
