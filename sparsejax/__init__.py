"""Sparser and shallower transformers in JAX."""
