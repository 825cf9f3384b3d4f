"""The adaptation table: verdicts of models that are right, wrong or fail, and its forms."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from dicp.conformance.__main__ import app
from dicp.conformance.families.adaptation import Verdict, judge
from dicp.conformance.families.internlm2 import InternLM2
from dicp.conformance.families.models import FAMILIES, Family, families_named
from dicp.conformance.families.table import NO_TARGET, Table, columns_of
from dicp.conformance.isolation import run_module
from dicp.errors import FamilyNameError
from dicp.testing import BackendUnderTest


class Small(nn.Module):
    """Of the form of a family's model: `logits`, and a `loss` with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        spectrum = torch.linalg.eigvalsh(hidden.mT @ hidden)
        return {"logits": hidden.cos(), "loss": spectrum.sum()}


def small(package: str = "") -> Family:
    return Family("small", Small, lambda: {"input_ids": torch.arange(8).view(1, 8)}, "", package)


class Perturbed:
    """A backend that adds to the first result of every graph."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            first, *others = gm(*arguments)
            return (first + self.by, *others)

        return call


@pytest.mark.parametrize(("by", "state"), [(0.0, "ok"), (1e-4, "wrong")])
def test_a_wrong_tensor_is_found(by: float, state: str) -> None:
    backend = BackendUnderTest("eager")
    backend.inner = Perturbed(by)
    found = judge(small(), backend, train=True)
    assert (found.state, found.good) == (state, state == "ok")
    if state == "wrong":
        assert "largest error 1.0e-04" in found.text and "logits" in found.text
        assert found.largest > 1


def test_calls_left_to_eager_are_listed() -> None:
    found = judge(small(), BackendUnderTest("cpugraph"), train=False)
    assert found.text == "eager 1: aten._linalg_eigh.default"


def test_a_family_without_its_package_names_the_command() -> None:
    found = judge(small("no_such_package"), BackendUnderTest("eager"), train=False)
    assert found.state == "failed" and "pip install no_such_package" in found.text


def test_an_error_of_the_backend_is_a_row() -> None:
    def broken(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("no such unit\nmore")

    backend = BackendUnderTest("eager")
    backend.inner = broken
    found = judge(small(), backend, train=False)
    assert found.state == "failed" and "no such unit" in found.detail and "\n" not in found.text


def test_a_process_that_dies_or_hangs_is_told(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(
        "import json, os, sys, time\n"
        "job = json.load(sys.stdin)\n"
        "print(json.dumps({'began': job['how']}), flush=True)\n"
        "os.abort() if job['how'] == 'abort' else time.sleep(60)\n"
    )
    start = time.monotonic()
    for how, words in (("abort", "by signal SIGABRT"), ("hang", "it hangs: no end within 2 s")):
        ended = run_module("dying", {"how": how}, 2.0, PYTHONPATH=str(tmp_path))
        assert ended.told == [{"began": how}] and words in ended.how
    assert time.monotonic() - start < 30, "a process that hangs is waited for"


def test_the_table_has_a_column_for_each_chip() -> None:
    verdicts = [
        Verdict("a", "ascendgraph", "ok"),
        Verdict("b", "ascendgraph", "eager", eager={"aten.x": 2, "aten.y": 1}),
        Verdict("c", "ascendgraph", "failed", "\nfirst | line <b>\nsecond"),
    ]
    table = Table("Families", columns_of(["ascendgraph"], True), ["a", "b", "c"],
                  {(v.family, v.backend): v for v in verdicts})  # fmt: skip
    first, *_, last = table.columns
    assert first.heading == "Ascend A2 (ascendgraph, simulator)"
    assert last.heading == "Hygon K100_AI (no target)"
    rows = table.markdown().splitlines()[4:]
    assert rows[0].startswith("| a | ok | ok | no target |")
    assert "eager 3: aten.x 2x, aten.y" in rows[1]
    assert "failed: first \\| line \\<b>" in rows[2]
    assert "first | line &lt;b&gt;" in table.html() and table.html().count(NO_TARGET) >= 15
    assert json.loads(table.json())["verdicts"][2]["detail"].endswith("second")


def test_every_shape_of_a_family_is_meant_by_its_name() -> None:
    assert [f.title for f in families_named(["llama2"])] == ["llama2 7B", "llama2 70B"]
    assert len({family.title for family in FAMILIES}) == len(FAMILIES) == len(families_named([]))
    with pytest.raises(FamilyNameError, match="Did you mean 'qwen3_moe'"):
        families_named(["qwen3-moe"])


def test_internlm2_computes_what_llama_does_with_unpacked_weights() -> None:
    """The two differ in how weights are packed alone."""
    (family,) = families_named(["internlm2"])
    model = family.model()
    from transformers import LlamaConfig, LlamaForCausalLM  # needs what building a model defines

    assert isinstance(model, InternLM2)
    config, state = model.config, model.state_dict()
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, use_cache=False,
        rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    ))  # fmt: skip
    names = {
        "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm",
        "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj", "ffn_norm": "post_attention_layernorm",
        "layers.": "model.layers.", "tok_embeddings": "model.embed_tokens", "output": "lm_head",
    }  # fmt: skip
    unpacked = {}
    for name, weight in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if not name.endswith("attention.wqkv.weight"):
            unpacked["model.norm.weight" if name == "norm.weight" else name] = weight
            continue
        rows = weight.view(config.kv_heads, -1, config.head_size, config.hidden_size)
        parts = {"q": rows[:, :-2], "k": rows[:, -2], "v": rows[:, -1]}
        for part, of in parts.items():
            place = name.replace("attention.wqkv", f"self_attn.{part}_proj")
            unpacked[place] = of.reshape(-1, config.hidden_size)
    llama.load_state_dict(unpacked)
    batch = family.labelled()
    got, expected = model(**batch), llama(**batch)
    torch.testing.assert_close(got["logits"], expected.logits)
    torch.testing.assert_close(got["loss"], expected.loss)


def test_the_command_writes_the_table_and_fails_with_a_cell(tmp_path: Path) -> None:
    asked = ["models", "--backends", "eager", "--families", "internlm2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "internlm2, eager: ok" in done.output
    assert "| internlm2 | ok |" in (tmp_path / "adaptation.md").read_text()
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".html"}
    late = CliRunner().invoke(app, [*asked, "--seconds", "0.1"])
    assert late.exit_code == 1 and "failed: it hangs" in late.output
    assert CliRunner().invoke(app, [*asked[:3], "--families", "lama2"]).exit_code == 2
    assert CliRunner().invoke(app, ["models", "--backends", "nogrph"]).exit_code == 2
