"""Fine-tune a Llama on instructions with low-rank adapters, and compare losses with eager's."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dicp.testing.models.llama_weights import LAYOUTS, load_llama
from dicp.testing.models.tiny_llama import llama
from examples import frame
from examples.text import BYTES, tokenizer
from examples.training import Result, Run, show_losses

VARIABLE = "LLAMA_FINETUNE_DIR"
HOLDS = (
    f"base_model/ ({LAYOUTS}, and a tokenizer) and alpaca_data.json (a list of instruction, input, "
    "output)"
)
ADAPTERS, PROGRESS = "adapter_model.safetensors", "training.pt"
INSTRUCTIONS = [
    {"instruction": instruction, "input": given, "output": output}
    for instruction, given, output in (
        ("Add.", "2 + 3", "5"),
        ("Name a colour.", "", "Blue"),
        ("Translate to French.", "water", "eau"),
        ("Reverse the word.", "loop", "pool"),
        ("Give the plural.", "kernel", "kernels"),
        ("Name the capital.", "Japan", "Tokyo"),
        ("Count the letters.", "graph", "5"),
        ("Is it even?", "7", "No"),
    )
]
"""What is learned where no folder is given."""
IGNORED = -100
"""The label of padding."""


@dataclass(frozen=True)
class Plan:
    """How long and in which steps a run trains, and where its checkpoint lies."""

    steps: int
    batch: int
    accumulate: int
    rate: float
    seed: int
    checkpoint: Path | None = None
    resume: bool = False
    save: bool = True
    stop_at: int = 0

    @property
    def last(self) -> int:
        return self.stop_at or self.steps

    def resumed(self, *files: str) -> Path:
        """The checkpoint to resume from; raises ExampleError where it lacks a file."""
        if self.checkpoint is None:
            raise frame.ExampleError("--resume needs the folder that --checkpoint wrote")
        for name in files:
            if not (self.checkpoint / name).exists():
                raise frame.ExampleError(f"{self.checkpoint} holds no {name} to resume from")
        return self.checkpoint


def instruction_rows(folder: Path | None, cutoff: int) -> list[list[int]]:
    """Instructions and their answers as tokens, `cutoff` at most."""
    rows = json.loads((folder / "alpaca_data.json").read_text()) if folder else INSTRUCTIONS
    tokens = tokenizer(folder / "base_model" if folder else None)
    texts = (
        f"### Instruction:\n{row['instruction']}\n"
        + (f"### Input:\n{row['input']}\n" if row["input"] else "")
        + f"### Response:\n{row['output']}"
        for row in rows
    )
    return [tokens.encode(text)[:cutoff] for text in texts]


def padded(rows: Sequence[Sequence[int]], length: int = 0) -> dict[str, Tensor]:
    """Rows as ids, mask and labels (N, length), as long as the longest where no length is given."""
    length = length or max(map(len, rows))

    def filled(row: Sequence[int], value: int) -> list[int]:
        return [*row, *[value] * (length - len(row))]

    columns = {
        "input_ids": [filled(row, 0) for row in rows],
        "attention_mask": [filled([1] * len(row), 0) for row in rows],
        "labels": [filled(row, IGNORED) for row in rows],
    }
    return {name: torch.tensor(values) for name, values in columns.items()}


def fine_tune(
    model: Any, rows: Sequence[Sequence[int]], length: int, plan: Plan, forward: Callable[..., Any]
) -> Run:
    """AdamW with a cosine schedule; each step sums gradients of several batches."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], plan.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)
    done = _restore(model, optimizer, schedule, plan) if plan.resume else 0
    order = random.Random(plan.seed).sample(range(len(rows)), len(rows))
    run = Run([], [])
    for step in range(done, plan.last):
        torch.manual_seed(plan.seed + step)  # a resumed run draws the same dropout
        start, total = time.perf_counter(), 0.0
        for part in range(plan.accumulate):
            first = (step * plan.accumulate + part) * plan.batch
            chosen = [rows[order[k % len(order)]] for k in range(first, first + plan.batch)]
            batch = {n: t.to(model.device) for n, t in padded(chosen, length).items()}
            loss = forward(**batch, use_cache=False).loss / plan.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.losses.append(total)
        run.seconds.append(time.perf_counter() - start)
        if plan.checkpoint and plan.save:
            _save(model, optimizer, schedule, plan.checkpoint, step + 1)
    return run


def _save(model: Any, optimizer: Any, schedule: Any, folder: Path, step: int) -> None:
    model.save_pretrained(folder, save_embedding_layers=False)
    states = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "step": step}
    torch.save(states, folder / PROGRESS)


def _restore(model: Any, optimizer: Any, schedule: Any, plan: Plan) -> int:
    folder = plan.resumed(ADAPTERS, PROGRESS)
    set_peft_model_state_dict(model, load_file(folder / ADAPTERS))
    states = torch.load(folder / PROGRESS, weights_only=True)
    optimizer.load_state_dict(states["optimizer"])
    schedule.load_state_dict(states["schedule"])
    return int(states["step"])


class Recorder(TrainerCallback):
    """Times the steps of a Trainer, and ends it at a step."""

    def __init__(self, last: int) -> None:
        self.last, self.seconds, self.start = last, [], time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.start)
        self.start = now
        control.should_training_stop |= state.global_step >= self.last


def fine_tune_by_trainer(
    model: Any, rows: Sequence[Sequence[int]], length: int, plan: Plan, folder: Path
) -> Run:
    """The same by transformers' Trainer, which writes its checkpoints into a folder."""
    save = bool(plan.checkpoint and plan.save)
    arguments = TrainingArguments(
        str(folder), max_steps=plan.steps, per_device_train_batch_size=plan.batch,
        gradient_accumulation_steps=plan.accumulate, learning_rate=plan.rate, seed=plan.seed,
        lr_scheduler_type="cosine", logging_steps=1, save_strategy="steps" if save else "no",
        save_steps=1, save_total_limit=1, report_to=[], disable_tqdm=True,
        remove_unused_columns=False, use_cpu=model.device.type == "cpu",
        dataloader_pin_memory=False,
    )  # fmt: skip
    recorder = Recorder(plan.last)
    trainer = Trainer(model, arguments, partial(padded, length=length), list(rows),
                      callbacks=[recorder])  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    if plan.resume and not any(plan.resumed().glob("checkpoint-*")):
        raise frame.ExampleError(f"{plan.checkpoint} holds no checkpoint-* to resume from")
    trainer.train(resume_from_checkpoint=plan.resume or None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(losses[-len(recorder.seconds) :], recorder.seconds)


def main(
    backend: frame.Backend = "cpugraph",
    dynamic: frame.Dynamic = False,
    device: frame.Device = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the schedule.")] = 8,
    weights: Annotated[Path | None, frame.weights_folder(VARIABLE, HOLDS)] = None,
    compare: frame.Compare = False,
    trainer: Annotated[bool, typer.Option("--trainer", help="Use transformers' Trainer.")] = False,
    batch: Annotated[int, typer.Option(min=1)] = 2,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of a step.")] = 2,
    lora_rank: Annotated[int, typer.Option(min=1)] = 8,
    lora_alpha: Annotated[int, typer.Option(min=1)] = 16,
    lora_dropout: Annotated[float, typer.Option(min=0.0, max=0.9)] = 0.05,
    rate: frame.Rate = 1e-4,
    cutoff: Annotated[int, typer.Option(min=2, help="Tokens of a row at most.")] = 512,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Write adapters and progress there after every step.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from --checkpoint.")] = False,
    stop_at: Annotated[int, typer.Option(min=0, help="End early, after this step.")] = 0,
    seed: frame.Seed = 0,
) -> Result:
    """Fine-tune a Llama by low-rank adapters; prints losses, with --compare beside eager's."""
    torch.manual_seed(seed)
    frame.say_random(weights, VARIABLE, HOLDS)
    with frame.loading(weights, HOLDS):
        rows = instruction_rows(weights, cutoff)
        base = load_llama(weights / "base_model") if weights else llama(BYTES)
    lora = LoraConfig(r=lora_rank, lora_alpha=lora_alpha, lora_dropout=lora_dropout,
                      target_modules=["q_proj", "v_proj"])  # fmt: skip
    model = get_peft_model(base, lora).to(device).train()
    plan = Plan(steps, batch, accumulate, rate, seed, checkpoint, resume, stop_at=stop_at)
    length = 0 if dynamic else max(map(len, rows))
    compiler = frame.Compiler(backend, dynamic)

    def run(model: Any, plan: Plan, compiled: bool) -> Run:
        draws = {"fallback_random": True} if compare else {}  # eager's dropout, to compare with
        if not trainer:
            forward = compiler(model, **draws) if compiled else model
            return fine_tune(model, rows, length, plan, forward)
        if compiled:
            model.forward = compiler(model.forward, **draws)
        with frame.folder_or_temporary(plan.checkpoint) as folder:
            return fine_tune_by_trainer(model, rows, length, plan, folder)

    eager = run(copy.deepcopy(model), replace(plan, save=False), False) if compare else None
    result = Result(run(model, plan, True), eager)
    show_losses(result)
    return result
