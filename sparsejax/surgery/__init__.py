"""Functions from a model to a model: `f(config, params, ...) -> (config, params)`.

| function | what changes | result |
|---|---|---|
| `remove_attention`, `remove_ffn` | one part of a layer is gone | another model |
| `parallelize_blocks` | whole layers read one input | another model |
| `fuse_ffns` | a run of feed-forward layers becomes one | equal to reading one input |
| `split_ffn` | one feed-forward layer becomes parallel ones | equal |
| `permute_neurons` | the order of neurons | equal |
| `prune_ffn` | fewer neurons (a report as third value) | approximation |
| `drop_dead_neurons` | fewer neurons (a report) | equal on the tokens it was shown |
| `reduce_kv_heads` | fewer key/value heads | approximation |
| `relufy` | ReLU for other activations (a report) | approximation |

They never change their arguments; leaves that stay are shared between the trees. Arrays, arrays on
a mesh, tracers (under `jax.jit`) and `jax.ShapeDtypeStruct`s are all taken, so a change can be
planned on shapes alone (`sparsejax.param_shapes`) for models that fit nowhere. Dtypes and shardings
stay, no matrix is gathered, and every function checks its arguments before it computes anything.

Memory: new leaves are made one at a time, and those of the old tree live as long as the caller
keeps it. With `donate=True` they are freed on the way, and beside the tree there is no more than
the leaf being made. As everywhere in jax, arrays that share memory with a donated one, such as the
replicated copies that `jax.device_put` makes of it, go with it.
"""

from sparsejax.surgery.attention import reduce_kv_heads, remove_attention
from sparsejax.surgery.fuse import FusionReport, fuse_ffns, plan_fusion, split_ffn
from sparsejax.surgery.neurons import channel_contribution, permute_neurons
from sparsejax.surgery.parallel import parallelize_blocks
from sparsejax.surgery.prune import (
    PrunedLayer,
    PruneReport,
    drop_dead_neurons,
    prune_ffn,
    remove_ffn,
)
from sparsejax.surgery.relufy import RelufiedLayer, ReluReport, relufy

__all__ = [
    "FusionReport",
    "PruneReport",
    "PrunedLayer",
    "ReluReport",
    "RelufiedLayer",
    "channel_contribution",
    "drop_dead_neurons",
    "fuse_ffns",
    "parallelize_blocks",
    "permute_neurons",
    "plan_fusion",
    "prune_ffn",
    "reduce_kv_heads",
    "relufy",
    "remove_attention",
    "remove_ffn",
    "split_ffn",
]
