"""What is counted without a GPU, against committed numbers: compiled instructions, and the work of the host."""
