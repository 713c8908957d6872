"""Sparser and shallower transformers in JAX.

>>> config = sparsejax.presets.tiny()
>>> params = sparsejax.init_params(config, jax.random.key(0))
>>> logits = sparsejax.apply(config, params, tokens)  # (B, T, V) float32
"""

from sparsejax import presets, surgery
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, RopeConfig
from sparsejax.model import Options, apply, forward
from sparsejax.params import check_params, init_params, param_shapes
from sparsejax.sharding import MeshConfig, make_mesh

__all__ = [
    "AttentionConfig",
    "FFNConfig",
    "LayerConfig",
    "MeshConfig",
    "ModelConfig",
    "Options",
    "RopeConfig",
    "apply",
    "check_params",
    "forward",
    "init_params",
    "make_mesh",
    "param_shapes",
    "presets",
    "surgery",
]
