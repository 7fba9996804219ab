"""End-to-end quality: does a swapped kernel hurt a model."""
