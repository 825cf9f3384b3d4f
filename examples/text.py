"""Text as tokens: a model's own tokenizer, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BYTES = 256
"""Tokens of `ByteTokenizer`."""


class ByteTokenizer:
    """Bytes of UTF-8 are tokens; the tokenizer of models with random weights."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(tokens).decode(errors="replace")


def tokenizer(folder: Path | None) -> Any:
    """The tokenizer in a folder of weights, Hugging Face's or `tokenizer.model` alone."""
    if folder is None:
        return ByteTokenizer()
    from transformers import AutoTokenizer, LlamaTokenizer

    whole = (folder / "config.json").exists()
    return (AutoTokenizer if whole else LlamaTokenizer).from_pretrained(folder)
