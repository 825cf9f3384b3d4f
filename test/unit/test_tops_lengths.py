"""Language models on texts of changing lengths: a graph for each shape bucket, eager's results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_tops_padding import Compiled, mark
from torch import Tensor, nn

from dicp.testing import torchvision_operators

torchvision_operators.define()  # before anything imports torchvision

from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM  # noqa: E402

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore::dicp.errors.SimulatorWarning")]
WORDS, TEXTS = 50, 2


def llama() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                    num_attention_heads=4, num_key_value_heads=2)
    ).eval()  # fmt: skip
    return model, lambda ids: model(input_ids=ids, use_cache=False).logits


def bert() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Attends to all words but the last of each text."""
    model = BertModel(
        BertConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
                   intermediate_size=24, max_position_embeddings=32)
    ).eval()  # fmt: skip

    def call(ids: Tensor) -> Tensor:
        seen = torch.arange(ids.shape[1]) < ids.shape[1] - 1
        return model(input_ids=ids, attention_mask=seen.expand(ids.shape)).last_hidden_state

    return model, call


@pytest.mark.parametrize("make", [llama, bert])
def test_lengths_of_one_bucket_share_a_graph(
    make: Callable[[], tuple[nn.Module, Callable[[Tensor], Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, call = make()
    compiled = Compiled(call, monkeypatch)
    for length in (5, 7, 13, 11, 6, 20):
        ids = torch.randint(0, WORDS, (TEXTS, length))
        mark([ids], length)
        with torch.no_grad():
            torch.testing.assert_close(compiled.run(ids), call(ids), rtol=1e-4, atol=1e-5)
    assert compiled.sizes(1) == {8, 16, 20}
    (driver,) = compiled.target._drivers.values()
    assert driver.simulator is not None and len(driver.simulator.models) == 3
    eager = [n for r in compiled.backend.reports for n in r.nodes if n.decision == "eager"]
    assert not eager
