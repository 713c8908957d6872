"""Reading config.json so that no key is ever passed over: what nobody took is an error.

A reader takes the keys it understands. `Keys.finish` then refuses every other key that is not null
and not known to leave the model's outputs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from sparsejax.config import RopeConfig
from sparsejax.convert.safetensors_io import FolderError

# Keys without any influence on what the model computes at inference.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "block_return_only_hidden_states",
        "bos_token_id",
        "cache_implementation",
        "do_sample",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "is_llama_config",
        "label2id",
        "llama4_attn_implementation",
        "max_length",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)

# Their names of activations. Our gelu is the tanh form; the exact one is another function.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
}
WRITTEN = {"silu": "silu", "relu": "relu", "gelu": "gelu_pytorch_tanh"}


def pass_keys(*names: str) -> str:
    """How to vouch for keys, in Python and on the command line."""
    listed = "".join(f"{name!r}, " for name in names)
    listed = listed.rstrip() if len(names) == 1 else listed.removesuffix(", ")
    return f"pass ignore_keys=({listed}) (experiments/convert.py: --ignore-keys {' '.join(names)})"


class Keys:
    """The keys of one JSON object, taken one by one."""

    def __init__(self, values: dict[str, Any], place: str, ignore: Collection[str] = ()):
        """Nothing is taken yet.

        Args:
          values: the object.
          place: its name in messages, such as "config.json".
          ignore: keys the caller vouches for.
        """
        self.values, self.place = values, place
        self.ignored, self._taken = frozenset(ignore), set()

    def take(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is absent or null."""
        self._taken.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
          FolderError: it is absent and has no default, or is no positive integer.
        """
        value = self.take(key, default)
        if value is None:
            raise FolderError(f"{self.place}: key {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FolderError(f"{self.place}: {key!r} must be a positive integer, got {value!r}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number.

        Raises:
          FolderError: it is absent and has no default, or is no number.
        """
        value = self.take(key, default)
        if value is None:
            raise FolderError(f"{self.place}: key {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FolderError(f"{self.place}: {key!r} must be a number, got {value!r}")
        return float(value)

    def only(self, **allowed: Iterable[Any]) -> None:
        """Takes keys that our model has no field for; absent, null and the values given do nothing.

        Raises:
          FolderError: another value; names the keys.
        """
        wrong = []
        for key, values in allowed.items():
            value = self.take(key)
            if value is not None and value not in list(values):
                wrong.append(key)
        if wrong:
            raise self.unsupported(*wrong)

    def unsupported(self, *keys: str, hint: str = "") -> FolderError:
        """The error for keys whose values ask for what our model does not have."""
        verbs = (
            "changes the mathematics and is" if len(keys) == 1 else "change the mathematics and are"
        )
        return FolderError(f"{self.place}: {self._said(keys)} {verbs} not supported{hint}")

    def _said(self, keys: Collection[str]) -> str:
        return ", ".join(f"{key!r} = {self.values.get(key)!r}" for key in keys)

    def finish(self, harmless: Collection[str] = HARMLESS) -> None:
        """Raises FolderError for the keys that nobody took, all at once."""
        known = self._taken | set(harmless) | self.ignored
        unknown = [k for k, value in self.values.items() if k not in known and value is not None]
        if not unknown:
            return
        one = len(unknown) == 1
        raise FolderError(
            f"{self.place}: {self._said(unknown)} "
            + ("is not a known key, so it" if one else "are not known keys, so they")
            + " may change the mathematics and "
            + ("is not supported; if it does not, " if one else "are not supported; if not, ")
            + pass_keys(*unknown)
        )


def read_activation(keys: Keys, key: str = "hidden_act") -> Any:
    """Our name of the activation.

    Raises:
      FolderError: it is none of ours, as the exact GELU.
    """
    name = keys.take(key, "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        hint = " (the tanh form, gelu_pytorch_tanh, is)" if name == "gelu" else ""
        raise keys.unsupported(key, hint=hint)
    return ACTIVATIONS[name]


def read_rope(keys: Keys) -> RopeConfig:
    """Rotary settings, from `rope_parameters` as from the older `rope_theta` and `rope_scaling`.

    Raises:
      FolderError: another scaling than linear and llama3, a partial rotation, or two settings that
        differ.
    """
    theta = keys.take("rope_theta")
    if theta is not None:
        keys.real("rope_theta")
    old, new = keys.take("rope_scaling"), keys.take("rope_parameters")
    keys.only(partial_rotary_factor=(1.0,), rotary_pct=(1.0,), rope_interleaved=(False,))
    keys.only(position_embedding_type=("rope",), use_mrope=(False,))
    spoken = [_rope(keys, name, value, theta) for name, value in _named(old, new)]
    if not spoken:
        return RopeConfig(theta=1e4 if theta is None else keys.real("rope_theta"))
    if len(spoken) == 2 and spoken[0] != spoken[1]:
        raise FolderError(
            f"{keys.place}: 'rope_parameters' = {new!r} and 'rope_scaling' = {old!r} with "
            f"rope_theta = {theta!r} are not the same rotary embedding"
        )
    return spoken[0]


def _named(old: Any, new: Any) -> list[tuple[str, Any]]:
    named = [("rope_scaling", old), ("rope_parameters", new)]
    return [(name, value) for name, value in named if value]


def _rope(keys: Keys, name: str, values: Any, theta: float | None) -> RopeConfig:
    if not isinstance(values, dict) or any(isinstance(v, dict) for v in values.values()):
        raise keys.unsupported(name)
    inner = Keys(values, f"{keys.place}: {name}", keys.ignored)
    new, old = inner.take("rope_type"), inner.take("type")
    kind = new or old or "default"
    if new and old and new != old:
        raise inner.unsupported("type", hint=f" together with rope_type = {new!r}")
    inner.only(partial_rotary_factor=(1.0,))
    fields: dict[str, Any] = {"theta": inner.real("rope_theta", 1e4 if theta is None else theta)}
    if theta is not None and fields["theta"] != float(theta):
        raise FolderError(
            f"{keys.place}: 'rope_theta' = {theta} and {name}.rope_theta = {fields['theta']} differ"
        )
    if kind == "linear":
        fields |= {"scaling": "linear", "factor": inner.real("factor")}
        inner.take("original_max_position_embeddings")  # linear scaling does not use it
    elif kind == "llama3":
        fields |= {
            "scaling": "llama3",
            "factor": inner.real("factor"),
            "low_freq_factor": inner.real("low_freq_factor"),
            "high_freq_factor": inner.real("high_freq_factor"),
            "original_context": inner.whole("original_max_position_embeddings"),
        }
    elif kind != "default":
        raise inner.unsupported("rope_type" if new else "type")
    inner.finish(harmless=())
    return RopeConfig(**fields)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which old and new readers understand."""
    if rope.scaling == "none":
        scaling = None
    else:
        # Old readers look for "type".
        scaling = {"rope_type": rope.scaling, "type": rope.scaling, "factor": rope.factor}
    if scaling is not None and rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
