"""The networks of the course that builds the framework needle, in PyTorch.

Source: assignments of "Deep Learning Systems: Algorithms and Implementation" (dlsyscourse.org).
Modules draw their weights when they are created: another order of creation is another network.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A module's result added to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x


class MLPResNet(nn.Sequential):
    """Residual blocks of two linear layers: rows of width `dim` -> logits (N, classes)."""

    def __init__(
        self,
        dim: int,
        hidden: int = 100,
        blocks: int = 3,
        norm: Callable[[int], nn.Module] = nn.BatchNorm1d,
        dropout: float = 0.0,
        classes: int = 10,
    ) -> None:
        def block() -> nn.Module:
            inner = nn.Sequential(
                nn.Linear(hidden, hidden // 2), norm(hidden // 2), nn.ReLU(), nn.Dropout(dropout),
                nn.Linear(hidden // 2, hidden), norm(hidden),
            )  # fmt: skip
            return nn.Sequential(Residual(inner), nn.ReLU())

        first = [nn.Linear(dim, hidden), nn.ReLU()]
        super().__init__(*first, *(block() for _ in range(blocks)), nn.Linear(hidden, classes))


class ConvNHWC(nn.Module):
    """Convolution of (N, height, width, in) with weights (k, k, in, out), ceil(size / stride)."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        bound = math.sqrt(6 / (size * size * inputs))  # kaiming_uniform for ReLU
        self.weight = nn.Parameter(torch.empty(size, size, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.stride, self.padding = stride, (size - 1) // 2

    def forward(self, x: Tensor) -> Tensor:
        x, weight = x.permute(0, 3, 1, 2), self.weight.permute(3, 2, 0, 1)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding).permute(0, 2, 3, 1)


class ConvBN(nn.Module):
    """Convolution, normalization over each channel's batch and points, ReLU; NHWC."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int) -> None:
        super().__init__()
        self.conv, self.norm = ConvNHWC(inputs, outputs, size, stride), nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.norm(x.reshape(-1, x.shape[-1])).view(x.shape).relu()


class ResNet9(nn.Sequential):
    """Eight convolutions and a classifier: (N, height, width, channels) -> logits (N, classes).

    The course's has width 16 and takes the first step by 4 points, for images of 32 by 32.
    """

    def __init__(
        self, channels: int = 3, width: int = 16, first_stride: int = 4, classes: int = 10
    ) -> None:
        def pair(outputs: int) -> nn.Module:
            return Residual(nn.Sequential(*(ConvBN(outputs, outputs, 3, 1) for _ in range(2))))

        super().__init__(
            ConvBN(channels, width, 7, first_stride), ConvBN(width, 2 * width, 3, 2),
            pair(2 * width),
            ConvBN(2 * width, 4 * width, 3, 2), ConvBN(4 * width, 8 * width, 3, 2),
            pair(8 * width),
            PointMean(), nn.Linear(8 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, classes),
        )  # fmt: skip


class PointMean(nn.Module):
    """The mean over height and width of NHWC."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2))


class RNNCell(nn.Module):
    """h' = f(x W + b + h U + c), with f tanh or ReLU; its state is (h,)."""

    def __init__(self, inputs: int, hidden: int, nonlinearity: str = "tanh") -> None:
        super().__init__()
        self.inputs, self.hidden = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.activate = {"tanh": torch.tanh, "relu": torch.relu}[nonlinearity]

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.activate(self.inputs(x) + self.hidden(state[0])),)


class LSTMCell(nn.Module):
    """Input, forget and output gates around a memory c; its state is (h, c)."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs, self.hidden = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, c = state
        enter, forget, value, leave = (self.inputs(x) + self.hidden(h)).chunk(4, 1)
        c = forget.sigmoid() * c + enter.sigmoid() * value.tanh()
        return leave.sigmoid() * c.tanh(), c


class LanguageModel(nn.Module):
    """Layers of cells over embedded tokens (N, length) -> logits (N, length, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, cells: nn.ModuleList, states: int) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(vocabulary, width), cells
        self.classify, self.states = nn.Linear(width, vocabulary), states

    def forward(self, tokens: Tensor) -> Tensor:
        steps = self.embed(tokens).unbind(1)
        for cell in self.cells:
            state = tuple(torch.zeros_like(steps[0]) for _ in range(self.states))
            found = []
            for x in steps:
                state = cell(x, state)
                found.append(state[0])
            steps = found
        return self.classify(torch.stack(list(steps), 1))


class Attention(nn.Module):
    """Causal attention of several heads, behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.project = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm(x)
        query, key, value = (
            layer(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class Transformer(nn.Module):
    """Layers of attention and a feed-forward network: tokens (N, length) -> logits."""

    def __init__(
        self, vocabulary: int, width: int, length: int, layers: int = 2, heads: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(self._layer(width, heads) for _ in range(layers)))
        self.classify = nn.Linear(width, vocabulary)

    @staticmethod
    def _layer(width: int, heads: int) -> nn.Module:
        feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
        return nn.Sequential(Residual(Attention(width, heads)), Residual(feed))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.classify(self.layers(self.embed(tokens) + self.position(places)))


def rnn(vocabulary: int, width: int, layers: int = 2, nonlinearity: str = "tanh") -> LanguageModel:
    cells = nn.ModuleList(RNNCell(width, width, nonlinearity) for _ in range(layers))
    return LanguageModel(vocabulary, width, cells, states=1)


def lstm(vocabulary: int, width: int, layers: int = 2) -> LanguageModel:
    cells = nn.ModuleList(LSTMCell(width, width) for _ in range(layers))
    return LanguageModel(vocabulary, width, cells, states=2)
