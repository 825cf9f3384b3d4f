"""A CUDA training program, unchanged but for the import that is given as its first argument.

Prints its losses. Run without an import on the CPU, it shows what they have to be.
"""

import importlib
import os
import sys
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

if sys.argv[1] != "cpu":
    importlib.import_module(sys.argv[1])
DEVICE = "cpu" if sys.argv[1] == "cpu" else "cuda"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, words: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(Block(width, 2))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


def main() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (16, 9))
    model = Model().to(DEVICE)
    pinned = DEVICE == "cuda"
    loader = DataLoader(TensorDataset(ids), batch_size=8, pin_memory=pinned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, enabled=pinned)
    losses = []
    for epoch in range(2):
        for (batch,) in loader:
            batch = batch.to(DEVICE, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=epoch > 0):
                logits = model(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        again = Model().to(DEVICE)
        again.load_state_dict(torch.load(path, map_location=DEVICE)["model"])
        with torch.no_grad():
            same = torch.equal(again(ids.to(DEVICE)), model(ids.to(DEVICE)))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() > 0 and next(model.parameters()).is_cuda
    print("LOSSES", *(f"{loss:.6f}" for loss in losses), same)


if __name__ == "__main__":
    main()
