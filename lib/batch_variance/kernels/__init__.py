"""Kernels, one folder an operation: a reference simple enough to believe, Triton for CUDA, policies as data."""
