"""Models at sizes that fill a large GPU, written in PyTorch alone.

Few layers, wide and with large batches: a step is long enough to measure, a compilation short
enough to wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.model import Model, itself, random_classes, random_values

VOCABULARY = 16384
CLASSES = 1000


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class LlamaLayer(nn.Module):
    def __init__(self, size: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, size // heads
        self.before, self.after = RMSNorm(size), RMSNorm(size)
        self.qkv = nn.Linear(size, (heads + 2 * groups) * self.head, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.gate = nn.Linear(size, 3 * size, bias=False)
        self.up = nn.Linear(size, 3 * size, bias=False)
        self.down = nn.Linear(3 * size, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.before(x)).view(batch, length, -1, self.head).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.groups, self.groups), 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, size: int, layers: int, heads: int, groups: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size)
        self.layers = nn.ModuleList(LlamaLayer(size, heads, groups) for _ in range(layers))
        self.norm = RMSNorm(size)
        self.head = nn.Linear(size, VOCABULARY, bias=False)
        self.width = size // heads

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        place = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        rates = 1e4 ** (-torch.arange(0, self.width, 2, device=ids.device) / self.width)
        angles = torch.outer(place, rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class Bert(nn.Module):
    """An encoder of PyTorch's own layers, with GELU and norms after the sums."""

    def __init__(self, size: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, size), nn.Embedding(length, size)
        self.norm = nn.LayerNorm(size)
        self.layers = nn.ModuleList(EncoderLayer(size, heads, first=False) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.tokens(ids) + self.places(places))
        for layer in self.layers:
            x = layer(x)
        return x


class EncoderLayer(nn.Module):
    def __init__(self, size: int, heads: int, first: bool) -> None:
        super().__init__()
        self.heads, self.first = heads, first
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.one, self.two = nn.LayerNorm(size), nn.LayerNorm(size)

    def mixed(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return self.out(out.transpose(1, 2).reshape(batch, length, size))

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = x + self.mixed(self.one(x))
            return x + self.down(F.gelu(self.up(self.two(x))))
        x = self.one(x + self.mixed(x))
        return self.two(x + self.down(F.gelu(self.up(x))))


class ViT(nn.Module):
    def __init__(self, size: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size, 16, 16)
        self.places = nn.Parameter(torch.randn(1, 196, size) * 0.02)
        self.layers = nn.ModuleList(EncoderLayer(size, heads, first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        nn.init.zeros_(self.body[-1].weight)  # else rounding errors grow too large to compare
        self.short = nn.Identity() if stride == 1 and inside == outside else nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def resnet50(blocks: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inside = 64
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(inside, 64 << stage, stride))
            inside = 256 << stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES)]
    return nn.Sequential(*layers, *head)


class ConvNeXtBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(size, size, 7, padding=3, groups=size)
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.scale = nn.Parameter(torch.full((size,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    """A diffusion network's block: group norm, SiLU, convolution, twice."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.one, self.two = nn.GroupNorm(32, size), nn.GroupNorm(32, size)
        self.first = nn.Conv2d(size, size, 3, padding=1)
        self.second = nn.Conv2d(size, size, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(F.silu(self.one(x)))
        return x + self.second(F.silu(self.two(y)))


def convnext(size: int, count: int) -> nn.Module:
    blocks = [ConvNeXtBlock(size) for _ in range(count)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, size, 4, 4), *blocks, *head)


def unet(size: int, count: int) -> nn.Module:
    first, last = nn.Conv2d(4, size, 3, padding=1), nn.Conv2d(size, 4, 3, padding=1)
    return nn.Sequential(first, *(ResidualBlock(size) for _ in range(count)), last)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def models(full: bool) -> list[Model]:
    """Every model; unless `full`, so small that a CPU can run them to test the harness."""

    def pick(large: int, small: int) -> int:
        return large if full else small

    size, length, side = pick(2048, 64), pick(1024, 16), pick(224, 32)
    layers, batch = pick(4, 1), pick(8, 2)
    many = pick(128, 2)
    return [
        Model(
            "llama", "decoder", lambda: Llama(size, layers, pick(16, 4), pick(4, 2)),
            lambda: {"ids": _tokens(batch, length)}, itself, random_classes,
        ),
        Model(
            "bert", "encoder", lambda: Bert(size // 2, layers, pick(16, 4), length),
            lambda: {"ids": _tokens(2 * batch, length)}, itself, random_values,
        ),
        Model(
            "resnet50", "convolution", lambda: resnet50((3, 4, 6, 3) if full else (1, 1)),
            lambda: {"input": torch.randn(many, 3, side, side)}, itself, random_classes,
        ),
        Model(
            "vit", "vision transformer", lambda: ViT(pick(1024, 64), layers, pick(16, 4)),
            lambda: {"x": torch.randn(many // 2, 3, 224, 224)}, itself, random_classes,
        ),
        Model(
            "convnext", "depthwise convolution", lambda: convnext(pick(256, 64), layers),
            lambda: {"input": torch.randn(many // 2, 3, side, side)}, itself, random_classes,
        ),
        Model(
            "unet", "diffusion", lambda: unet(pick(320, 64), layers),
            lambda: {"input": torch.randn(many // 8 or 1, 4, pick(64, 8), pick(64, 8))},
            itself, random_values,
        ),
    ]  # fmt: skip


def find(name: str, full: bool) -> Model:
    return next(model for model in models(full) if model.name == name)
