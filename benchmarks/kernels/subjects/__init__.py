"""Kernels and their plain twins, made ready to be timed. Imported when a run begins: these modules need torch and the
native extension."""
