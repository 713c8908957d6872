"""Makes the folders of golden/ with transformers: python tests/sparsejax/convert/make_golden.py

Each is a small random model as transformers writes it, and golden.npz with what transformers
computes from it in float32 on a CPU. Needs torch and transformers.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

GOLDEN = Path(__file__).parent / "golden"
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name: configuration class, its settings, dtype of the files, changes to config.json afterwards.
MODELS = {
    "llama2": ("Llama", {"num_key_value_heads": 4}, "bfloat16", {}),
    "llama31": (
        "Llama",
        {
            "rope_theta": 5e5,
            "rope_scaling": LLAMA3,
            "tie_word_embeddings": True,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
        },
        "float32",
        {},
    ),
    # As files were before transformers 5.
    "llama_linear": (
        "Llama",
        {"rope_theta": 1e3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "float32",
        {
            "rope_parameters": None,
            "rope_theta": 1e3,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 128, "rope_theta": 1e6}, "bfloat16", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}, "float32", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_theta": 1e6}, "float32", {}),
    "llama_sparse_relu": (
        "Llama",
        {"hidden_act": "relu", "tie_word_embeddings": True, "rope_theta": 1e5},
        "bfloat16",
        {
            "architectures": ["SparseLlamaForCausalLM"],
            "model_type": "llama_sparse_relu",
            "hidden_act": "silu",  # the published code replaces it
            "sparsity_gated_mlp": True,
            "sparsity_l1_coeff": 2e-5,
            "sparsity_new_intermediate_size": None,
        },
    ),
    "deci": (
        "Llama",
        {"num_hidden_layers": 5, "rope_theta": 5e5, "rope_scaling": LLAMA3},
        "bfloat16",
        {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas"},
    ),
}
# key/value heads (None: no attention) and feed-forward width (None: no feed-forward part).
BLOCKS = ((2, 256), (None, 512), (4, None), (1, 96), (None, None))


class NoAttention(torch.nn.Module):
    def forward(self, hidden_states, **_):
        return torch.zeros_like(hidden_states), None


class NoMLP(torch.nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


def unequal_layers(model, base, blocks=BLOCKS):
    """Gives each layer of a Llama its own widths, from transformers' own parts."""
    for i, (layer, (kv_heads, d_ff)) in enumerate(zip(model.model.layers, blocks, strict=True)):
        own = base | {"num_key_value_heads": kv_heads or 4, "intermediate_size": d_ff or 48}
        config = transformers.LlamaConfig(**own)
        config._attn_implementation = "eager"
        layer.self_attn = LlamaAttention(config, i) if kv_heads else NoAttention()
        layer.mlp = LlamaMLP(config) if d_ff else NoMLP()
        layer.input_layernorm = layer.input_layernorm if kv_heads else torch.nn.Identity()
        layer.post_attention_layernorm = (
            layer.post_attention_layernorm if d_ff else torch.nn.Identity()
        )


def block_configs():
    blocks = []
    for kv_heads, d_ff in BLOCKS:
        attention = {"no_op": kv_heads is None, "n_heads_in_group": kv_heads and 4 // kv_heads}
        ffn = {"no_op": d_ff is None}
        if d_ff == 96:
            ffn["intermediate_size"] = 96
        else:
            ffn["ffn_mult"] = d_ff and {256: 10.5, 512: 24.0}[d_ff]
        blocks.append({"attention": attention, "ffn": ffn})
    return blocks


def build(name):
    kind, settings, dtype, _ = MODELS[name]
    torch.manual_seed(sum(name.encode()) + 1)
    base = COMMON | settings
    config = getattr(transformers, f"{kind}Config")(**base)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if name == "deci":
        unequal_layers(model, base)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("bias"):
                # One on v goes to all tokens alike: with more, one token follows everything.
                weight.copy_((0.5 if "v_proj" in path else 2.0) * torch.randn_like(weight))
            elif "norm" in path:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
            else:
                # Against a tied embedding layers must be strong, or each token follows itself.
                strong = base.get("tie_word_embeddings") and "embed" not in path
                weight.copy_((0.4 if strong else 0.2) * torch.randn_like(weight))
            # What the files can hold, so that float32 computes from the very same numbers. (Casting
            # the model would also round the rotary frequencies.)
            weight.copy_(weight.to(getattr(torch, dtype)))
    return model.eval()


@torch.no_grad()
def compute(model):
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 64, (3, 20))
    tokens[2] = np.tile(tokens[2, :2], 10)  # repeats
    mask = np.ones((2, 14), np.int64)
    mask[0, :5] = 0
    padded = np.where(mask, generator.integers(0, 64, (2, 14)), 0)
    places = np.clip(np.cumsum(mask, axis=1) - 1, 0, None)
    as_torch = {k: torch.tensor(v) for k, v in {"t": tokens, "m": mask, "p": padded}.items()}
    left = model(
        as_torch["p"],
        attention_mask=as_torch["m"],
        position_ids=torch.tensor(places),
        use_cache=False,
    )
    cached = not any(isinstance(layer.self_attn, NoAttention) for layer in model.model.layers)
    greedy = model.generate(
        as_torch["p"],
        attention_mask=as_torch["m"],
        do_sample=False,
        max_new_tokens=64,
        pad_token_id=0,
        use_cache=cached,
    )
    at = torch.tensor([[0, 1000, 8192]])
    cos, sin = model.model.rotary_emb(torch.zeros(1, 3, 1), at)
    return {
        "tokens": tokens,
        "logits": model(as_torch["t"], use_cache=False).logits.numpy(),
        "padded": padded,
        "mask": mask,
        "padded_logits": left.logits.numpy(),
        "greedy": greedy[:, padded.shape[1] :].numpy(),
        "rope_cos": cos[0].numpy(),
        "rope_sin": sin[0].numpy(),
    }


def main(names):
    for name in names:
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build(name)
        results = compute(model)
        dtype, changes = MODELS[name][2:]
        size = "40KB" if name == "llama2" else "5GB"
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=size)
        (folder / "generation_config.json").unlink()
        values = json.loads((folder / "config.json").read_text()) | changes
        if name == "deci":
            values |= {"block_configs": block_configs(), "num_key_value_heads": None}
            values["intermediate_size"] = None
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        np.savez_compressed(folder / "golden.npz", **results)
        print(name, sum(f.stat().st_size for f in folder.iterdir()), "bytes")


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))
