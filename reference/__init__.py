"""The truth: one readable oracle per operation, in plain torch."""
