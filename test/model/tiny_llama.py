"""A Llama with tiny sizes and random weights."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 211


def llama(vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
    ).eval()
