"""Training by public libraries: python library_training.py PROGRAM cpu|IMPORT.

Prints the losses: on the CPU in float64 and float32, after IMPORT in float32 on device "cuda".
"""

import importlib
import sys
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dicp.testing import torchvision_operators

torchvision_operators.define()
ON_CPU = sys.argv[2] == "cpu"
if not ON_CPU:
    importlib.import_module(sys.argv[2])
DEVICE = "cpu" if ON_CPU else "cuda"


def resnet(dtype: torch.dtype) -> list[float]:
    """ResNet-50 of torchvision by SGD with momentum, weights in channels-last memory."""
    import torchvision

    model = torchvision.models.resnet50(num_classes=10, zero_init_residual=True)
    model = model.to(DEVICE, dtype).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    images, labels = torch.randn(8, 3, 32, 32).to(dtype), torch.randint(0, 10, (8,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, pin_memory=not ON_CPU)
    losses = []
    for _ in range(3):
        for image, label in loader:
            image, label = image.to(DEVICE, non_blocking=True), label.to(DEVICE, non_blocking=True)
            loss = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    with torch.inference_mode():
        losses.append(F.cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE)).item())
    return losses


def accelerated(dtype: torch.dtype) -> list[float]:
    """Accelerate: the optimizer is made before the model moves, gradients are accumulated."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=2)
    assert accelerator.device.type == DEVICE
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    data = TensorDataset(torch.randn(32, 8).to(dtype), torch.randint(0, 4, (32,)))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, 8), schedule
    )
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss).mean().item())
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
    return losses


class Words(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trainer(dtype: torch.dtype) -> list[float]:
    """Hugging Face Trainer with a checkpoint that is resumed from, evaluation, and `generate`."""
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    AcceleratorState._reset_state(True)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    kept = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **kept, **ends)).to(dtype)
    with tempfile.TemporaryDirectory() as folder:

        def of_steps(steps: int) -> Trainer:
            arguments = TrainingArguments(
                folder, per_device_train_batch_size=4, max_steps=steps, logging_steps=1,
                save_steps=2, report_to=[], use_cpu=ON_CPU, disable_tqdm=True, learning_rate=1e-2,
                lr_scheduler_type="constant",
            )  # fmt: skip
            assert arguments.device.type == DEVICE
            return Trainer(model, arguments, train_dataset=Words())

        of_steps(2).train()
        again = of_steps(4)
        again.train(resume_from_checkpoint=True)
        losses = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
        losses.append(again.evaluate(Words())["eval_loss"])
    model.eval()
    ids = torch.tensor([[1, 2, 3]], device=DEVICE)
    short = {"max_new_tokens": 6, "pad_token_id": 0}
    losses += model.generate(ids, do_sample=False, **short)[0].tolist()
    losses += model.generate(ids, do_sample=False, num_beams=3, **short)[0].tolist()
    sampled = model.generate(ids, do_sample=True, top_k=8, top_p=0.9, **short)
    assert sampled.shape == (1, 9) and sampled.device.type == DEVICE
    return losses


def main() -> None:
    program = {"resnet": resnet, "accelerate": accelerated, "trainer": trainer}[sys.argv[1]]
    for dtype in (torch.float64, torch.float32) if ON_CPU else (torch.float32,):
        torch.manual_seed(0)
        print("LOSSES", *program(dtype))


if __name__ == "__main__":
    main()
