"""Device time of kernels that were judged first: ours and the peers' in one run, against ceilings of the same run."""
