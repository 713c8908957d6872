"""Pallas kernels for sparse feed-forward layers; knows jax only."""
