"""Llama models on disk: both layouts give the same model, in one file or in several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dicp.testing import torchvision_operators

torchvision_operators.define()

from model.llama_weights import CUT_BY_COLUMNS, LAYER, OTHER, instruction_tokens, load_llama  # noqa: E402
from model.tiny_llama import llama  # noqa: E402

HEADS = {"attention.wq": 4, "attention.wk": 2}


def consolidated(state: dict[str, torch.Tensor], layers: int = 2) -> dict[str, torch.Tensor]:
    """A model's weights as Meta's files name and order them."""
    found = {f"{ours}.weight": state[f"{theirs}.weight"] for ours, theirs in OTHER.items()}
    for number in range(layers):
        for ours, theirs in LAYER.items():
            weight = state[f"model.layers.{number}.{theirs}.weight"]
            if ours in HEADS:
                rows, columns = weight.shape
                parts = weight.view(HEADS[ours], 2, -1, columns)
                weight = parts.transpose(1, 2).reshape(rows, columns)
            found[f"layers.{number}.{ours}.weight"] = weight
    return found


def parts(name: str, weight: torch.Tensor, count: int, release: int) -> list[torch.Tensor]:
    if weight.dim() == 1:
        return [weight] * count
    columns = any(f".{cut}." in name for cut in CUT_BY_COLUMNS)
    columns |= release == 2 and name.startswith("tok_embeddings")
    return [part.clone() for part in weight.chunk(count, 1 if columns else 0)]


@pytest.mark.parametrize(("files", "release"), [(1, 2), (2, 2), (2, 3)])
def test_a_consolidated_model_gives_the_same_numbers(
    files: int, release: int, tmp_path: Path
) -> None:
    model = llama()
    whole = consolidated(model.state_dict())
    for k in range(files):
        rows = {n: parts(n, w, files, release)[k] for n, w in whole.items()}
        torch.save(rows | {"rope.freqs": torch.ones(3)}, tmp_path / f"consolidated.{k:02}.pth")
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-6}
    (tmp_path / "params.json").write_text(json.dumps(params | {"vocab_size": -1}))
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(load_llama(tmp_path)(tokens).logits, model(tokens).logits)


def test_the_layout_of_hugging_face(tmp_path: Path) -> None:
    model, tokens = llama(), torch.arange(12).reshape(1, 12)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_llama(tmp_path)(tokens).logits, model(tokens).logits)


def test_a_folder_without_a_model_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json .* or params\.json"):
        load_llama(tmp_path)


def test_instructions_become_rows_of_tokens(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    (tmp_path / "alpaca_data.json").write_text(json.dumps([row, row]))
    tokens = instruction_tokens(tmp_path, length=16)
    assert bytes(tokens[0].tolist()) == b"Add.\n1 2\n3Add.\n1" and tokens.shape == (2, 16)
