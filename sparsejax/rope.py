"""Rotary position embedding: plain, linear and Llama-3 scaling, in the half-split convention."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from sparsejax.config import RopeConfig


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """theta^(-2i/K) for i < K/2, scaled as `rope.scaling` says; (K/2,) float32.

    "llama3" keeps frequencies whose wavelength 2 pi / f is under original_context /
    high_freq_factor, divides those over original_context / low_freq_factor by `factor`, and blends
    linearly (in original_context / wavelength) between.

    Source: RoFormer, arXiv 2104.09864; Llama 3.1 model code.
    """
    freq = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling == "linear":
        freq = freq / rope.factor
    elif rope.scaling == "llama3":
        periods = rope.original_context * freq / (2 * np.pi)
        keep = (periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        freq = keep * freq + (1 - keep) * freq / rope.factor
    return freq.astype(np.float32)


def rotate(x: Array, positions: Array, rope: RopeConfig) -> Array:
    """Rotates pairs (x_i, x_{i + K/2}) of x (B, T, N, K) by positions (B, T) * frequency_i.

    Angles, sines and products are float32; the result has x's dtype.
    """
    half = x.shape[-1] // 2
    angle = positions.astype(jnp.float32)[..., None] * inverse_frequencies(x.shape[-1], rope)
    cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
