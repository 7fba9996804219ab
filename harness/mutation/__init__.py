"""The judge's own exam: planted faults it must find, variants it must accept, cases that must prove something."""
