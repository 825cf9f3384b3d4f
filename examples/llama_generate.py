"""A Llama writes on a prompt: prefill and decode are compiled once each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dicp.testing.models.llama_weights import LAYOUTS, load_llama
from dicp.testing.models.tiny_llama import llama
from examples import frame
from examples.text import BYTES, tokenizer

VARIABLE, HOLDS = "LLAMA_MODEL_DIR", f"{LAYOUTS}, and a tokenizer"


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; greedily, with temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0

    def chooser(self) -> Callable[[Tensor, Tensor], int]:
        """A function of the tokens (length) and logits (vocabulary) so far, with its own draws."""
        generator = torch.Generator().manual_seed(self.seed)
        change = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            change.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature:
            change.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                change.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                change.append(TopPLogitsWarper(self.top_p))

        def choose(tokens: Tensor, logits: Tensor) -> int:
            scores = change(tokens[None], logits[None])[0]
            if not self.temperature:
                return int(scores.argmax())
            return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

        return choose


@dataclass(frozen=True)
class Generated:
    """New tokens, the float32 logits (vocabulary) that each was chosen from, and seconds."""

    tokens: list[int]
    logits: list[Tensor]
    prefill: float
    decode: float


class Generator:
    """A model with a static key-value cache for `length` tokens, called through `forward`."""

    def __init__(self, model: Any, forward: Callable[..., Any], length: int) -> None:
        config = model.config
        self.device, self.forward = model.device, forward
        self.cache = StaticCache(config, max_cache_len=length)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.cache.early_initialization(
            1, config.num_key_value_heads, head_dim, model.dtype, model.device
        )

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], steps: int, sampling: Sampling, end: int | None = None
    ) -> Generated:
        """Up to `steps` tokens after the prompt, fewer where `end` is chosen."""
        self.cache.reset()
        choose = sampling.chooser()
        tokens, logits = torch.tensor(prompt), []
        found, prefill = frame.timed(self._logits, tokens)
        decode = 0.0
        while True:
            logits.append(found)
            tokens = torch.cat([tokens, torch.tensor([choose(tokens, found)])])
            if len(logits) == steps or tokens[-1] == end:
                return Generated(tokens[len(prompt) :].tolist(), logits, prefill, decode)
            found, seconds = frame.timed(self._logits, tokens[-1:])
            decode += seconds

    def _logits(self, tokens: Tensor) -> Tensor:
        inputs = tokens[None].to(self.device)
        output = self.forward(input_ids=inputs, cache=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1].float().cpu()


@dataclass(frozen=True)
class Difference:
    """The first token where two runs differ, with each run's logits (vocabulary) there."""

    step: int
    compiled: int
    eager: int
    compiled_logits: Tensor
    eager_logits: Tensor


def first_difference(compiled: Generated, eager: Generated) -> Difference | None:
    """Where two runs first chose different tokens; None where nowhere."""
    for step, chosen in enumerate(zip(compiled.tokens, eager.tokens, strict=False)):
        if chosen[0] != chosen[1]:
            return Difference(step, *chosen, compiled.logits[step], eager.logits[step])
    return None


@dataclass(frozen=True)
class Result:
    """A text, the seconds that its graphs took to compile, and eager's run if it was asked for."""

    text: str
    compiled: Generated
    compile_seconds: float
    eager: Generated | None = None


def main(
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "The meaning of life is",
    backend: frame.Backend = "cpugraph",
    dynamic: frame.Dynamic = False,
    device: frame.Device = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 32,
    weights: Annotated[Path | None, frame.weights_folder(VARIABLE, HOLDS)] = None,
    compare: frame.Compare = False,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], typer.Option(help="Of the weights.")
    ] = "float32",
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: all tokens.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(min=0.0)] = 1.0,
    seed: frame.Seed = 0,
) -> Result:
    """Continue a text with a Llama; prints the text, tokens per second and compile seconds."""
    torch.manual_seed(seed)
    frame.say_random(weights, VARIABLE, HOLDS)
    kind = getattr(torch, dtype)
    with frame.loading(weights, HOLDS):
        model = load_llama(weights, kind) if weights else llama(BYTES).to(kind)
        tokens = tokenizer(weights)
    model.to(device)
    ids = tokens.encode(prompt)
    if not ids:
        raise frame.ExampleError("the prompt has no token: give --prompt a text")
    sampling = Sampling(temperature, top_p, top_k, repetition_penalty, seed)
    generator = Generator(model, frame.Compiler(backend, dynamic)(model), len(ids) + steps)
    first = generator.generate(ids, min(2, steps), sampling)  # compiles prefill and decode
    compiled = generator.generate(ids, steps, sampling, tokens.eos_token_id)
    eager = None
    if compare:
        plain = Generator(model, model, len(ids) + steps)
        eager = plain.generate(ids, steps, sampling, tokens.eos_token_id)
    decode = compiled.decode / max(len(compiled.tokens) - 1, 1)
    compile_seconds = max(first.prefill - compiled.prefill, 0.0) + max(first.decode - decode, 0.0)
    text = tokens.decode(compiled.tokens, skip_special_tokens=True)
    print(f"{prompt}{text}")
    report(len(ids), compiled, eager)
    print(f"compiled in {compile_seconds:.1f} s")
    return Result(text, compiled, compile_seconds, eager)


def report(prompt: int, compiled: Generated, eager: Generated | None) -> None:
    """Print tokens per second, and where eager first differs."""
    runs = {"compiled": compiled, **({"eager": eager} if eager else {})}
    rows = []
    for name, run in runs.items():
        decoded = len(run.tokens) - 1
        speed = f"{decoded / run.decode:.1f}" if decoded else ""
        rows.append([name, f"{prompt / run.prefill:.1f}", speed])
    frame.show_table("tokens per second", ["", "prefill", "decode"], rows)
    if eager is None:
        return
    found = first_difference(compiled, eager)
    if found is None:
        gaps = [(a - b).abs().max() for a, b in zip(compiled.logits, eager.logits, strict=True)]
        print(f"all {len(eager.tokens)} tokens are eager's; logits differ by {max(gaps):.2g}")
        return
    rows = [
        [name, token, float(found.compiled_logits[token]), float(found.eager_logits[token])]
        for name, token in (("compiled", found.compiled), ("eager", found.eager))
    ]
    columns = ["chosen by", "token", "logit, compiled", "logit, eager"]
    frame.show_table(f"new token {found.step + 1} differs from eager's", columns, rows)
