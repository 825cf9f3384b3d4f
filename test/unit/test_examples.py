"""`python -m examples NAME` with tiny sizes: results beside eager's, and what errors say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `examples`, however pytest starts

from examples.__main__ import command, main  # noqa: E402
from examples.frame import ExampleError, packages  # noqa: E402


def run(name: str, backend: Any, *arguments: object, dynamic: bool = False) -> Any:
    """What an example returns for the backend under test, compared with eager."""
    words = ["--backend", backend.name, "--device", backend.device, "--compare"]
    words += ["--dynamic" if dynamic else "--static", *map(str, arguments)]
    return command(name)(words, standalone_mode=False)


def check_losses(result: Any, steps: int, rtol: float = 1e-4) -> None:
    """Every loss is eager's within rounding, which batch normalization of few values amplifies."""
    assert len(result.compiled.losses) == steps
    torch.testing.assert_close(
        torch.tensor(result.compiled.losses), torch.tensor(result.eager.losses), rtol=rtol, atol=0.0
    )


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command line that fails prints on stderr."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in arguments])
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_an_unknown_example_is_refused(capsys):
    said = failure(capsys, "llama_generat")
    assert "did you mean 'llama_generate'?" in said


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [("--device", "nosuch", "device string: nosuch"), ("--rate", "nan", "no number above 0")],
)
def test_a_device_or_rate_that_there_is_not_is_named(
    option: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["mobilenet_v2", option, value])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and problem in said


def test_a_missing_package_is_named_with_its_command(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "examples.llama_generate", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in failure(capsys, "llama_generate")
    with pytest.raises(ExampleError, match="pip install tiktoken"), packages():
        raise ImportError("to read a tokenizer: pip install tiktoken")
    with pytest.raises(ModuleNotFoundError, match="moved"), packages():
        raise ModuleNotFoundError("moved")


def test_a_folder_without_the_expected_files_is_refused(capsys, tmp_path):
    said = failure(capsys, "llama_generate", "--weights", tmp_path)
    assert "config.json and *.safetensors" in said and str(tmp_path) in said


def test_an_unknown_backend_is_refused(capsys):
    said = failure(capsys, "llama_generate", "--backend", "nonesuch")
    assert "no backend 'nonesuch'" in said and "cpugraph" in said


def test_llama_generate(backend, dynamic, capsys):
    result = run("llama_generate", backend, "--steps", 4, dynamic=dynamic)
    assert len(result.compiled.tokens) == 4 and result.compiled.tokens == result.eager.tokens
    torch.testing.assert_close(result.compiled.logits, result.eager.logits, rtol=1e-4, atol=1e-5)
    said = capsys.readouterr().out
    assert "all 4 tokens are eager's" in said and "random weights" in said


def test_sampling_restricts_the_choice():
    from examples.llama_generate import Sampling

    tokens, logits = torch.tensor([1]), torch.tensor([2.0, 3.0, 2.5, -1.0])

    def chosen(**options: Any) -> set[int]:
        choose = Sampling(**options).chooser()
        return {choose(tokens, logits) for _ in range(200)}

    assert chosen() == {1}
    assert chosen(temperature=1.0) == {0, 1, 2, 3}
    assert chosen(temperature=1.0, top_k=2) == {1, 2}
    assert chosen(temperature=1.0, top_p=0.4) == {1}
    assert chosen(repetition_penalty=2.0) == {2}  # token 1 was there
    assert chosen(temperature=1e-3) == {1}


def test_the_first_token_that_differs_is_shown(capsys):
    from examples.llama_generate import Generated, report

    logits = [torch.tensor([0.5, 1.0, 0.25])] * 3
    other = [logits[0], torch.tensor([0.5, 1.0, 1.25]), logits[0]]
    report(4, Generated([1, 1, 0], logits, 1.0, 1.0), Generated([1, 2, 1], other, 1.0, 1.0))
    said = capsys.readouterr().out
    assert "new token 2 differs from eager's" in said
    assert "0.25" in said and "1.25" in said


def test_llama_generate_reads_weights_and_tokenizer(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from dicp.testing.models.tiny_llama import llama

    words = {"a": 0, "b": 1, "c": 2, "[unk]": 3}
    tokens = Tokenizer(models.WordLevel(words, unk_token="[unk]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="c").save_pretrained(tmp_path)
    model = llama(4)
    model.save_pretrained(tmp_path)
    monkeypatch.setenv("LLAMA_MODEL_DIR", str(tmp_path))
    result = command("llama_generate")(
        ["--backend", "eager", "--prompt", "a b b", "--steps", "1"], standalone_mode=False
    )
    with torch.no_grad():
        expected = model(torch.tensor([[0, 1, 1]])).logits[0, -1]
    torch.testing.assert_close(result.compiled.logits[0], expected)
    assert result.text == "abc[unk]"[int(expected.argmax())]


@pytest.mark.static_only
def test_resnet50_train(backend, dynamic, capsys):
    """With the smallest network of the family, which compiles in a third of the time."""
    arguments = ("--model", "resnet18", "--steps", 2)
    check_losses(run("resnet50_train", backend, *arguments), steps=2)
    assert "eager on the CPU" in capsys.readouterr().out


def test_resnet50_train_on_pictures_from_a_checkpoint(tmp_path):
    import torchvision
    from PIL import Image

    for number, name in enumerate(["bird", "cat"] * 2):
        (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 50), (60 * number, 9, 200)).save(
            tmp_path / "data" / name / f"{number}.png"
        )
    (tmp_path / "weights").mkdir()
    model = torchvision.models.resnet18(num_classes=2)
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.copy_(torch.tensor([1.0, 0.0]))
    torch.save(model.state_dict(), tmp_path / "weights" / "resnet18.pth")
    words = ["--backend", "eager", "--model", "resnet18", "--steps", "1", "--size", "32"]
    words += ["--data", str(tmp_path / "data"), "--weights", str(tmp_path / "weights")]
    result = command("resnet50_train")(words, standalone_mode=False)
    logits, classes = model.fc.bias.expand(4, 2), torch.tensor([0, 0, 1, 1])
    expected = torch.nn.functional.cross_entropy(logits, classes)
    assert result.compiled.losses == pytest.approx([expected.item()])


def test_a_folder_without_one_checkpoint_is_refused(capsys, tmp_path):
    arguments = ("resnet50_train", "--model", "resnet18", "--weights", tmp_path)
    assert "holds 0 checkpoints; expected one checkpoint" in failure(capsys, *arguments)


@pytest.mark.dynamic_only
def test_hf_generate(backend, dynamic, capsys):
    options = ("--top-k", 20, "--top-p", 0.9, "--temperature", 0.8, "--repetition-penalty", 1.2)
    result = run("hf_generate", backend, "--steps", 3, "--do-sample", *options, dynamic=dynamic)
    assert len(result.compiled) == 3 and result.compiled == result.eager
    assert "all 3 tokens are eager's" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mixtral", "opt", "bloom"])
def test_hf_generate_builds_families_of_models(name):
    from examples.hf_generate import generate, tiny_model

    model = tiny_model(name).eval()
    assert len(generate(model, [5, 6, 7], 0, {"max_new_tokens": 2, "do_sample": False})) == 2
    assert sum(weight.numel() for weight in model.parameters()) < 300_000


def test_an_unknown_model_is_refused(capsys):
    assert "gpt2" in failure(capsys, "hf_generate", "--model", "gpt3")


@pytest.mark.sweep
@pytest.mark.static_only
def test_stable_diffusion(backend, dynamic, capsys, tmp_path):
    result = run("stable_diffusion", backend, "--steps", 2, "--vae", "--out", tmp_path)
    assert result.compiled.shape == (32, 32, 3) and result.near > 0.94
    assert "of the pixels differ from eager's by at most 2 of 255" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        "stable_diffusion.png", "stable_diffusion_eager.png"
    }  # fmt: skip


def test_pixels_near_are_counted():
    import numpy as np

    from examples.stable_diffusion import share_near

    image = np.full((2, 5, 3), 100, np.uint8)
    other = image.copy()
    other[0, 0], other[0, 1], other[1, 4] = 102, 103, 90
    assert share_near(image, other) == pytest.approx(0.8)


def test_stable_diffusion_reads_a_pipeline(tmp_path):
    from examples.stable_diffusion import image, tiny_pipeline

    torch.manual_seed(7)
    pipeline = tiny_pipeline()
    pipeline.save_pretrained(tmp_path / "weights")
    words = ["--backend", "eager", "--steps", "1", "--weights", str(tmp_path / "weights")]
    words += ["--out", str(tmp_path)]
    result = command("stable_diffusion")(words, standalone_mode=False)
    expected = image(pipeline, "a lighthouse", 1, 0)
    assert result.compiled.std() > 0 and (result.compiled == expected).all()


def test_llama_finetune(backend, dynamic, capsys):
    """Symbolic shapes by transformers' Trainer, static ones by the example's own loop."""
    arguments = ("--trainer",) if dynamic else ("--rate", 1e-2)
    result = run("llama_finetune", backend, "--steps", 2, *arguments, dynamic=dynamic)
    check_losses(result, steps=2)
    assert "difference" in capsys.readouterr().out


@pytest.mark.sweep
@pytest.mark.parametrize("trainer", [[], ["--trainer"]], ids=["loop", "trainer"])
def test_llama_finetune_resumes(trainer, tmp_path):
    words = ["--backend", "eager", "--steps", "3", "--rate", "0.01", *trainer]

    def losses(*more: str) -> list[float]:
        return command("llama_finetune")([*words, *more], standalone_mode=False).compiled.losses

    whole = losses()
    folder = ("--checkpoint", str(tmp_path))
    assert losses(*folder, "--stop-at", "1") == whole[:1]
    assert losses(*folder, "--resume") == pytest.approx(whole[1:], rel=1e-6)
    assert len(set(whole)) == 3


def test_llama_finetune_reads_instructions_of_a_folder(tmp_path):
    import json

    from examples.llama_finetune import INSTRUCTIONS, instruction_rows

    (tmp_path / "alpaca_data.json").write_text(json.dumps(INSTRUCTIONS[:1]))
    with pytest.raises(OSError):  # no tokenizer
        instruction_rows(tmp_path, 512)
    assert [len(row) for row in instruction_rows(None, 20)] == [20] * len(INSTRUCTIONS)


def test_what_llama_finetune_lacks_is_named(capsys, tmp_path):
    said = failure(capsys, "llama_finetune", "--weights", tmp_path)
    assert "alpaca_data.json" in said and "base_model/" in said
    said = failure(
        capsys, "llama_finetune", "--backend", "eager", "--resume", "--checkpoint", tmp_path
    )
    assert "holds no adapter_model.safetensors" in said


@pytest.mark.sweep
@pytest.mark.static_only
def test_needle(backend, dynamic, capsys, tmp_path):
    words = ["--backend", backend.name, "--device", backend.device, "--out", str(tmp_path)]
    words += ["--steps", "2", "--model", "mlp"]
    results = command("needle")(words, standalone_mode=False)
    assert results.keys() == {"none", "flip", "crop"}
    for result in results.values():
        assert len(result.compiled.losses) == 2
        assert result.compiled.losses == pytest.approx(result.eager.losses, rel=1e-4)
    assert len({result.compiled.losses[0] for result in results.values()}) == 3
    assert "difference" in capsys.readouterr().out
    assert (tmp_path / "needle.png").exists()


def test_augmentations_move_points():
    from examples.needle import random_crop, random_flip

    torch.manual_seed(0)
    images = torch.arange(1.0, 2 * 12 + 1).view(2, 3, 4, 1).repeat(20, 1, 1, 1)
    flipped = (random_flip(images) == images.flip(2)).all((1, 2, 3))
    kept = (random_flip(images) == images).all((1, 2, 3))
    assert 0 < flipped.sum() < 40 and 0 < kept.sum() < 40
    cropped = random_crop(images)
    padded = torch.nn.functional.pad(images, (0, 0, 1, 1, 1, 1))
    moved = torch.stack([
        (cropped == padded[:, y : y + 3, x : x + 4]).all((1, 2, 3))
        for y in range(3) for x in range(3)
    ])  # fmt: skip
    assert moved.any(0).all() and moved.any(1).sum() > 5


def test_needle_reads_no_other_folder(capsys, tmp_path):
    said = failure(capsys, "needle", "--data", tmp_path)
    assert "cifar-10-batches-py/" in said and "MNIST/raw/" in said


MOBILENET = ("--steps", 2, "--batch", 16, "--width", 0.25, "--rate", 0.003)
"""Here the second loss is within 1e-5 of float64's, and off by 1e-2 with twice the rate; smaller
batches amplify rounding more."""


@pytest.mark.sweep
@pytest.mark.static_only
@pytest.mark.parametrize("processes", [1, 2])
def test_mobilenet_v2(backend, dynamic, processes):
    """On two, each loss is the mean of two halves of the batch, whose gradients they share."""
    result = run("mobilenet_v2", backend, *MOBILENET, "--processes", processes)
    check_losses(result, steps=2, rtol=1e-3)
