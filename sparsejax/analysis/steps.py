"""A forward pass taken apart: one part of one layer at a time, called from the host.

Analyses run a model many times with something changed in one layer. Walking it part by part lets
them share what comes before the change, and compiles one small program per kind of part (its
config and the shapes of its parameters), however many layers, changes and batches there are. A
layer's parameters go in as arguments and stay where they lie on a mesh: nothing is gathered but,
inside the program of one part, what the parameters' own rules say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from sparsejax.config import LayerConfig, ModelConfig
from sparsejax.modules import Embed, Layer, Options, RMSNorm
from sparsejax.params import check_params, flatten
from sparsejax.sharding import BATCH_AXES, constrain
from sparsejax.types import Params

Part = Literal["attention", "ffn"]


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch on its way through the model.

    Attributes:
      tokens: (B, T) ids.
      positions: (B, T) rotary positions.
      segment_ids: (B, T) documents, or None.
      mask: (B, T) bool, the positions that count.
      count: how many do.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    mask: Any
    count: int


@dataclasses.dataclass(frozen=True)
class Stream:
    """A residual stream between two layers.

    Attributes:
      x: (B, T, D), the input of the next layer unless that is parallel with the previous one.
      base: (B, T, D), what the next layer reads if it is parallel with the previous one.
    """

    x: Array
    base: Array


class Walk:
    """The parts of one model, ready to be applied; counts what it applies.

    Attributes:
      config: the model.
      applied: parts applied so far, by ("attention" or "ffn", layer).
    """

    def __init__(self, config: ModelConfig, params: Params):
        check_params(config, params)
        shapes = [p for p, x in flatten(params).items() if isinstance(x, jax.ShapeDtypeStruct)]
        if shapes:
            raise ValueError(
                f"params must be arrays to run the model, and {shapes[0]} is a shape alone"
            )
        self.config, self._params = config, params
        # Without its layers the config of two models is the same, and so is a part's program.
        self._core = config.replace(layers=())
        self.applied: dict[tuple[Part, int], int] = {}

    def layer(self, i: int) -> tuple[LayerConfig, Params]:
        """Config and parameters of layer i."""
        return self.config.layers[i], self._params.get(f"layer_{i}", {})

    def embed(self, batch: Batch) -> Stream:
        """The stream in front of layer 0."""
        x = settled(_embed(self._core, self._params["embed"], batch.tokens))
        return Stream(x, x)

    def read(self, i: int, stream: Stream) -> Array:
        """What layer i reads."""
        return stream.base if self.config.layers[i].parallel_with_previous else stream.x

    def part(
        self,
        kind: Part,
        i: int,
        x: Array,
        batch: Batch,
        layer: tuple[LayerConfig, Params] | None = None,
    ) -> Array | None:
        """attention(norm(x)) or ffn(norm(x)) of layer i (or of `layer`), None if there is none."""
        config, params = self.layer(i) if layer is None else layer
        if getattr(config, kind) is None:
            return None
        self.applied[kind, i] = self.applied.get((kind, i), 0) + 1
        only = LayerConfig(
            attention=config.attention if kind == "attention" else None,
            ffn=config.ffn if kind == "ffn" else None,
        )
        names = ("attn", "attn_norm") if kind == "attention" else ("ffn", "ffn_norm")
        own = {name: params[name] for name in names}
        return settled(_part(self._core, only, own, x, batch.positions, batch.segment_ids))

    def parts(self, i: int, read: Array, batch: Batch) -> tuple[Array | None, Array | None]:
        """What attention and the feed-forward part of layer i add to the input it reads."""
        attention = self.part("attention", i, read, batch)
        return attention, self.part("ffn", i, add(read, attention), batch)

    def step(self, i: int, stream: Stream, batch: Batch) -> Stream:
        """The stream after layer i."""
        read = self.read(i, stream)
        return self.after(i, add(stream.x, add(*self.parts(i, read, batch))), read)

    def after(self, i: int, x: Array, read: Array) -> Stream:
        """The stream x after layer i, with what i read only where the next layer needs it."""
        following = self.config.layers[i + 1 : i + 2]
        return Stream(x, read if any(f.parallel_with_previous for f in following) else x)

    def finish(self, stream: Stream) -> Array:
        """Hidden states (B, T, D) after the final norm."""
        return settled(_final_norm(self._core, self._params["final_norm"], stream.x))

    def forwards(self) -> float:
        """Parts applied so far over the parts of the model: cost in full forward passes."""
        config = self.config
        total = len(config.attention_layers) + len(config.ffn_layers)
        return sum(self.applied.values()) / total if total else 0.0


def add(x: Any, delta: Any) -> Any:
    """x + delta, where either may be None for nothing."""
    if x is None or delta is None:
        return delta if x is None else x
    return settled(_add(x, delta))


def read_batches(function: str, batches: Iterable[Any]) -> Iterator[Batch]:
    """Batches checked, one at a time.

    Args:
      function: who asks, for errors.
      batches: token arrays (B, T), or dicts as a data loader gives them: "tokens" and, where
        present, "positions", "segment_ids" and "loss_mask" (positions that are False are left out).

    Raises:
      ValueError: something that is not such a batch, or no tokens at all in any of them.
    """
    if isinstance(batches, dict) or getattr(batches, "ndim", 3) < 3:
        raise ValueError(
            f"{function}: batches must be an iterable of batches; for a single one pass [batch]"
        )
    seen = 0
    for batch in batches:
        batch = batch if isinstance(batch, dict) else {"tokens": batch}
        if "tokens" not in batch:
            raise ValueError(f"{function}: a batch needs 'tokens', got {sorted(batch)}")
        batch = {k: v if isinstance(v, Array) else np.asarray(v) for k, v in batch.items()}
        tokens = batch["tokens"]
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"{function}: batches must hold integer tokens (B, T), got "
                f"{tokens.dtype}{list(tokens.shape)}"
            )
        for name in ("positions", "segment_ids", "loss_mask"):
            if batch.get(name) is not None and batch[name].shape != tokens.shape:
                raise ValueError(
                    f"{function}: {name} must have tokens' shape {list(tokens.shape)}, got "
                    f"{list(batch[name].shape)}"
                )
        mask = batch.get("loss_mask")
        mask = np.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
        positions = batch.get("positions")
        if positions is None:
            steps = np.arange(tokens.shape[1], dtype=np.int32)
            positions = np.broadcast_to(steps, tokens.shape)
        count = int(jnp.sum(mask))
        seen += count
        if count:
            yield Batch(tokens, positions, batch.get("segment_ids"), mask, count)
    if not seen:
        raise ValueError(f"{function}: batches hold no tokens to average over")


def on_mesh(params: Params) -> contextlib.AbstractContextManager[Any]:
    """Sets the mesh that the parameters lie on, unless one is set already."""
    if jax.sharding.get_abstract_mesh().empty:
        for leaf in jax.tree.leaves(params):
            sharding = getattr(leaf, "sharding", None)
            mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
            if isinstance(mesh, Mesh) and mesh.size > 1:
                return jax.set_mesh(mesh)
    return contextlib.nullcontext()


def settled(x: Array) -> Array:
    """x, on a mesh of host devices only when it is there.

    Those devices share a pool of as many threads: several programs with collectives in flight can
    hold all of them, each waiting for a device that another one blocks.
    """
    if jax.default_backend() == "cpu" and not isinstance(x, Tracer):
        return jax.block_until_ready(x) if len(x.sharding.device_set) > 1 else x
    return x


@functools.partial(jax.jit, static_argnums=0)
def _embed(core: ModelConfig, params: Params, tokens: Array) -> Array:
    module: Any = Embed(core)
    return module.apply({"params": params}, tokens)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _part(
    core: ModelConfig,
    layer: LayerConfig,
    params: Params,
    x: Array,
    positions: Array,
    segment_ids: Array | None,
) -> Array:
    module: Any = Layer(core, layer, Options())
    delta, _, _ = module.apply({"params": params}, x, positions, segment_ids, None)
    return constrain(delta, BATCH_AXES, None, None)


@functools.partial(jax.jit, static_argnums=0)
def _final_norm(core: ModelConfig, params: Params, x: Array) -> Array:
    module: Any = RMSNorm(core)
    return module.apply({"params": params}, x)


@jax.jit
def _add(x: Array, delta: Array) -> Array:
    return constrain(x + delta, *((BATCH_AXES, None, None) if x.ndim == 3 else (None,) * x.ndim))
