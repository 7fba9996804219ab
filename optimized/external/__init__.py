"""Kernels of other libraries, one file a library, imported only when used."""
