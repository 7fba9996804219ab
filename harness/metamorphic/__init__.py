"""Rearrangements of a case that a right kernel cannot notice: gate G8, its relations, and each operation's moves."""
