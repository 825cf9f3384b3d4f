"""Llama models from disk, in the layout of Hugging Face or in the consolidated one of Meta."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

LAYOUTS = "config.json and *.safetensors (Hugging Face), or params.json and *.pth (consolidated)"
LAYER = {
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
OTHER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
"""Names in the consolidated layout -> names in Hugging Face's."""
CUT_BY_COLUMNS = ("attention.wo", "feed_forward.w2")
"""Weights whose columns the files of a model share out; of other matrices they share the rows."""


def load_llama(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The model in `folder`, in eval mode.

    Raises FileNotFoundError, which names what is expected, where the folder has neither layout.
    """
    if (folder / "config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    files = sorted(folder.glob("*.pth"))
    if not files or not (folder / "params.json").exists():
        raise FileNotFoundError(f"{folder} holds no Llama model: expected {LAYOUTS}")
    shards = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    params = json.loads((folder / "params.json").read_text())
    names = [name for name in shards[0] if not name.endswith("freqs")]
    whole = {name: _joined(name, [s[name] for s in shards], params["dim"]) for name in names}
    config = _config(params, whole)
    model = LlamaForCausalLM(config).to(dtype)
    model.load_state_dict({_name(n): _rotated(n, w, config).to(dtype) for n, w in whole.items()})
    return model.eval()


def instruction_tokens(folder: Path, length: int) -> Tensor:
    """`alpaca_data.json` (a list of instruction, input, output) as rows of `length` tokens.

    Shorter texts are repeated. The tokenizer is `base_model`'s; without one, bytes are tokens.
    """
    rows = json.loads((folder / "alpaca_data.json").read_text())
    texts = ["\n".join(row[key] for key in ("instruction", "input", "output")) for row in rows]
    base = folder / "base_model"
    if any((base / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        tokens = [AutoTokenizer.from_pretrained(base)(text)["input_ids"] for text in texts]
    else:
        tokens = [list(text.encode()) for text in texts]
    return torch.tensor([[row[k % len(row)] for k in range(length)] for row in tokens])


def _joined(name: str, parts: Sequence[Tensor], width: int) -> Tensor:
    if len(parts) == 1 or parts[0].dim() == 1:  # every file has the norms
        return parts[0]
    by_columns = name.split(".", 2)[-1].removesuffix(".weight") in CUT_BY_COLUMNS
    if name.startswith("tok_embeddings"):  # Llama 2 cuts the columns, Llama 3 the rows
        by_columns = parts[0].shape[1] != width
    return torch.cat(list(parts), 1 if by_columns else 0)


def _config(params: dict, whole: dict[str, Tensor]) -> LlamaConfig:
    heads = params["n_heads"]
    return LlamaConfig(
        vocab_size=whole["tok_embeddings.weight"].shape[0],
        hidden_size=params["dim"],
        intermediate_size=whole["layers.0.feed_forward.w1.weight"].shape[0],
        num_hidden_layers=params["n_layers"],
        num_attention_heads=heads,
        num_key_value_heads=params.get("n_kv_heads") or heads,
        rms_norm_eps=params.get("norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": params.get("rope_theta", 10000.0)},
    )


def _name(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in OTHER:
        return f"{OTHER[base]}.weight"
    _, number, rest = base.split(".", 2)
    return f"model.layers.{number}.{LAYER[rest]}.weight"


def _rotated(name: str, weight: Tensor, config: LlamaConfig) -> Tensor:
    """Query and key rows reordered: there neighbours rotate together, here the parts of a head."""
    heads = {"wq": config.num_attention_heads, "wk": config.num_key_value_heads}
    count = next((n for key, n in heads.items() if f".{key}." in name), 0)
    if not count:
        return weight
    rows, columns = weight.shape
    return weight.view(count, -1, 2, columns).transpose(1, 2).reshape(rows, columns)
