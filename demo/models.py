"""The demo's models, for images of 8 by 8 points: a vision transformer and a residual network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
IMAGE, PATCH = 8, 2
PATCHES = (IMAGE // PATCH) ** 2


class Block(nn.Module):
    """A transformer block: attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.shrink(F.gelu(self.expand(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Patches of 2 by 2 points, a learned position each, the mean of the tokens classified."""

    def __init__(self, width: int = 64, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.position = nn.Parameter(0.02 * torch.randn(PATCHES, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.classify(self.norm(x).mean(1))


class Residual(nn.Module):
    """Two 3 by 3 convolutions with BatchNorm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of three stages with BatchNorm."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
        )
        self.classify = nn.Linear(4 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.stages(self.stem(images)).mean((2, 3)))
