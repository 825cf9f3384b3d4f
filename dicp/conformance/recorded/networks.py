"""Small networks after models that no library here builds: their operators, few of each layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
"""The classes that models tell apart."""


def conv(
    inner: int, outer: int, size: int = 3, stride: int = 1, act: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """A convolution that keeps the size of the image divided by the stride, norm, activation."""
    layer = nn.Conv2d(inner, outer, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outer), act())


class Sum(nn.ModuleList):
    """The sum of branches."""

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = (branch(x) for branch in self)
        for one in rest:
            first = first + one
        return first


class Joined(nn.ModuleList):
    """Branches beside each other in the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


class Gated(nn.Module):
    """Channels weighted by what their means say: squeeze and excitation."""

    def __init__(self, channels: int, gate: type[nn.Module] = nn.Sigmoid) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels // 4, 1), nn.ReLU(),
            nn.Conv2d(channels // 4, channels, 1), gate(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


def pooled_classifier(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def se_resnet() -> nn.Module:
    """Bottlenecks with squeeze and excitation. Source: arXiv:1709.01507."""

    def bottleneck(width: int) -> nn.Module:
        layers = (conv(width, width // 4, 1), conv(width // 4, width // 4),
                  conv(width // 4, width, 1, act=nn.Identity), Gated(width))  # fmt: skip
        return nn.Sequential(Sum([nn.Identity(), nn.Sequential(*layers)]), nn.ReLU())

    return nn.Sequential(
        conv(3, 32, 7, 2), nn.MaxPool2d(3, 2, 1), bottleneck(32), conv(32, 64, 3, 2),
        bottleneck(64), pooled_classifier(64),
    )  # fmt: skip


def rep_vgg() -> nn.Module:
    """Sums of 3 x 3, 1 x 1 and identity branches. Source: arXiv:2101.03697."""

    def block(inner: int, outer: int, stride: int) -> nn.Module:
        branches = [conv(inner, outer, 3, stride, nn.Identity),
                    conv(inner, outer, 1, stride, nn.Identity)]  # fmt: skip
        same = [nn.BatchNorm2d(inner)] if (inner, stride) == (outer, 1) else []
        return nn.Sequential(Sum([*branches, *same]), nn.ReLU())

    layers = (block(3, 16, 2), block(16, 16, 1), block(16, 32, 2), block(32, 32, 1))
    return nn.Sequential(*layers, pooled_classifier(32))


class Yolo(nn.Module):
    """Boxes of two scales from a backbone; the coarser features are upsampled for the finer."""

    def __init__(self, stem: nn.Module, deep: nn.Module, channels: int) -> None:
        super().__init__()
        self.stem, self.deep, self.up = stem, deep, nn.Upsample(scale_factor=2)
        self.coarse = nn.Conv2d(channels * 2, 3 * (5 + CLASSES), 1)
        self.fine = nn.Conv2d(channels * 3, 3 * (5 + CLASSES), 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.stem(images)
        coarse = self.deep(fine)
        parts = (self.coarse(coarse), self.fine(torch.cat([self.up(coarse), fine], 1)))
        loss = torch.zeros(())
        for part in parts:
            cells = part.unflatten(1, (3, 5 + CLASSES)).movedim(2, -1)
            place, size, sure = cells[..., :2].sigmoid(), cells[..., 2:4].exp(), cells[..., 4:]
            target = torch.rand(sure.shape).round()
            loss = loss + F.mse_loss(place, torch.rand(place.shape))
            loss = loss + F.binary_cross_entropy_with_logits(sure, target)
            loss = loss + F.smooth_l1_loss(size, torch.rand(size.shape))
        return loss


def darknet() -> nn.Module:
    """Source: arXiv:1804.02767."""

    def residual(width: int) -> nn.Module:
        layers = (conv(width, width // 2, 1, act=nn.LeakyReLU),
                  conv(width // 2, width, act=nn.LeakyReLU))  # fmt: skip
        return Sum([nn.Identity(), nn.Sequential(*layers)])

    stem = nn.Sequential(conv(3, 16, 3, 2, nn.LeakyReLU), conv(16, 32, 3, 2), residual(32))
    return Yolo(stem, nn.Sequential(conv(32, 64, 3, 2, nn.LeakyReLU), residual(64)), 32)


class PooledPyramid(nn.Module):
    """Features beside what three poolings in a row make of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.mix = conv(channels * 4, channels, 1, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.mix(torch.cat(parts, 1))


def csp_darknet() -> nn.Module:
    """Cross-stage partial blocks with SiLU, as YOLOv5 has them."""

    def partial(width: int) -> nn.Module:
        half = width // 2
        inner = nn.Sequential(conv(width, half, 1, act=nn.SiLU), conv(half, half, act=nn.SiLU))
        return nn.Sequential(
            Joined([inner, conv(width, half, 1, act=nn.SiLU)]), conv(width, width, 1, act=nn.SiLU)
        )

    stem = nn.Sequential(conv(3, 16, 5, 2, nn.SiLU), conv(16, 32, 3, 2, nn.SiLU), partial(32))
    deep = nn.Sequential(conv(32, 64, 3, 2, nn.SiLU), partial(64), PooledPyramid(64))
    return Yolo(stem, deep, 32)


class CenterNet(nn.Module):
    """Heat maps of centres, learned by a focal loss, and sizes. Source: arXiv:1904.07850."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(3, 16, 7, 2), conv(16, 32, 3, 2), conv(32, 64, 3, 2),
            nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.heat, self.size = nn.Conv2d(32, CLASSES, 1), nn.Conv2d(32, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images)
        heat = self.heat(features).sigmoid().clamp(1e-4, 1 - 1e-4)
        wanted = torch.rand(heat.shape)
        centre = wanted.ge(0.95)
        found = heat.log() * (1 - heat).pow(2) * centre
        missed = (1 - heat).log() * heat.pow(2) * (1 - wanted).pow(4) * ~centre
        peaks = F.max_pool2d(heat, 3, 1, 1).eq(heat).float().mean()
        size = self.size(features).flatten(2).transpose(1, 2)
        index = torch.randint(size.shape[1], (len(images), 5, 1)).expand(-1, -1, 2)
        loss = F.l1_loss(size.gather(1, index), torch.rand(len(images), 5, 2))
        return loss - (found + missed).sum() / centre.sum().clamp(min=1) + 0 * peaks


class DynamicHead(nn.Module):
    """Attention over levels, and an activation that depends on the image: arXiv:2106.08322."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([conv(3, 32, 3, 2), conv(32, 32, 3, 2), conv(32, 32, 3, 2)])
        self.spatial = conv(32, 32)
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 1, 1), nn.ReLU(), nn.Hardsigmoid()
        )
        self.task = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 128), nn.Hardsigmoid())
        self.classes = nn.Conv2d(32, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = []
        for level in self.levels:
            images = level(images)
            features.append(images)
        size = features[1].shape[-2:]
        same = [F.interpolate(f, size, mode="bilinear", align_corners=False) for f in features]
        mixed = torch.stack([f * self.scale(f) for f in map(self.spatial, same)]).mean(0)
        a, b, c, d = self.task(mixed.mean((2, 3)))[..., None, None].chunk(4, 1)
        mixed = torch.maximum(mixed * (2 * a - 1) + b - 0.5, mixed * (2 * c - 1) + d - 0.5)
        logits = self.classes(mixed)
        return F.binary_cross_entropy_with_logits(logits, torch.rand(logits.shape))


class Solo(nn.Module):
    """Masks by the cells of a grid, from features with coordinates: arXiv:1912.04488."""

    def __init__(self, grid: int = 4) -> None:
        super().__init__()
        self.grid = grid
        self.body = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2))
        self.norm = nn.Sequential(nn.Conv2d(34, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
        self.masks, self.classes = nn.Conv2d(32, grid**2, 1), nn.Conv2d(32, CLASSES, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images)
        lines = [torch.linspace(-1, 1, size) for size in features.shape[-2:]]
        places = torch.stack(torch.meshgrid(*lines, indexing="ij"))
        places = places.expand(len(images), -1, -1, -1)
        masks = self.masks(self.norm(torch.cat([features, places], 1))).sigmoid().flatten(2)
        wanted = torch.rand(masks.shape).round()
        dice = 2 * (masks * wanted).sum(-1) / (masks.square().sum(-1) + wanted.sum(-1) + 1e-3)
        logits = self.classes(F.interpolate(features, (self.grid, self.grid), mode="bilinear"))
        labels = torch.randint(CLASSES, (len(images), self.grid, self.grid))
        return (1 - dice).mean() + F.cross_entropy(logits, labels)


class PointPillars(nn.Module):
    """Points of columns of space, scattered into an image from above: arXiv:1812.05784."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.size = size
        self.points, self.norm = nn.Linear(9, 32, bias=False), nn.BatchNorm1d(32)
        self.body = nn.Sequential(conv(32, 32, 3, 2), conv(32, 64))
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.boxes, self.classes = nn.Conv2d(32, 14, 1), nn.Conv2d(32, 6, 1)

    def forward(self, pillars: Tensor, cells: Tensor) -> Tensor:
        seen = pillars.any(-1, keepdim=True)
        features = self.norm(self.points(pillars).transpose(1, 2)).relu().transpose(1, 2)
        columns = features.masked_fill(~seen, 0).max(1).values
        canvas = columns.new_zeros(32, self.size**2).index_copy(1, cells, columns.t())
        image = self.up(self.body(canvas.view(1, 32, self.size, self.size)))
        boxes, classes = self.boxes(image), self.classes(image)
        loss = F.smooth_l1_loss(boxes, torch.rand(boxes.shape))
        return loss + F.binary_cross_entropy_with_logits(classes, torch.rand(classes.shape))


class UNet(nn.Module):
    """Source: arXiv:1505.04597."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 32)
        self.down = nn.ModuleList(
            nn.Sequential(conv(a, b), conv(b, b)) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in (16, 8))
        self.mix = nn.ModuleList(conv(2 * w, w) for w in (16, 8))
        self.classes = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for k, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if k else x)
            kept.append(x)
        for up, mix, left in zip(self.up, self.mix, kept[-2::-1], strict=True):
            x = mix(torch.cat([left, up(x)], 1))
        return self.classes(x)


class PyramidPooling(nn.Module):
    """Means over parts of the image beside the features: arXiv:1612.01105."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2))
        self.parts = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), conv(32, 8, 1)) for size in (1, 2, 3, 6)
        )
        self.classes = nn.Sequential(conv(64, 32), nn.Dropout2d(0.1), nn.Conv2d(32, CLASSES, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(images)
        parts = [
            F.interpolate(part(x), x.shape[-2:], mode="bilinear", align_corners=True)
            for part in self.parts
        ]
        logits = self.classes(torch.cat([x, *parts], 1))
        return F.interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=True)


class Crnn(nn.Module):
    """Columns of an image read by a recurrent network, learned by CTC: arXiv:1507.05717."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(1, 16), nn.MaxPool2d(2), conv(16, 32), nn.MaxPool2d((8, 2)))
        self.read = nn.LSTM(32, 16, bidirectional=True)
        self.classes = nn.Linear(32, CLASSES + 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        columns = self.body(images).squeeze(2).permute(2, 0, 1)
        scores = self.classes(self.read(columns)[0]).log_softmax(-1)
        columns, symbols = (
            torch.full((len(images),), n) for n in (len(scores), labels.shape[1])
        )  # fmt: skip
        return F.ctc_loss(scores, labels, columns, symbols, zero_infinity=True)


class Sar(nn.Module):
    """A recurrent encoder, and a decoder that attends to the image: arXiv:1811.00751."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(1, 16, 3, 2), conv(16, 32, 3, 2))
        self.encode, self.decode = nn.LSTM(32, 32, batch_first=True), nn.LSTMCell(32, 32)
        self.symbols = nn.Embedding(CLASSES, 32)
        self.keys, self.query, self.score = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32, 32), \
            nn.Linear(32, 1)  # fmt: skip
        self.classes = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.body(images)
        columns = features.max(2).values.transpose(1, 2)
        state = self.encode(columns)[1]
        hidden, cell = (part[0] for part in state)
        keys, steps = self.keys(features).flatten(2).transpose(1, 2), []
        for symbol in self.symbols(labels).unbind(1):
            hidden, cell = self.decode(symbol, (hidden, cell))
            weights = self.score((keys + self.query(hidden)[:, None]).tanh()).softmax(1)
            glimpse = (weights * features.flatten(2).transpose(1, 2)).sum(1)
            steps.append(self.classes(torch.cat([hidden, glimpse], -1)))
        return F.cross_entropy(torch.stack(steps, 1).flatten(0, 1), labels.flatten())


class HrNet(nn.Module):
    """Two resolutions side by side that exchange features: arXiv:1902.09212."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.smaller = conv(3, 16, 3, 2), conv(16, 32, 3, 2)
        self.high, self.low = conv(16, 16), conv(32, 32)
        self.up, self.down = conv(32, 16, 1, act=nn.Identity), conv(16, 32, 3, 2, nn.Identity)
        self.maps = nn.Conv2d(16, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        high = self.stem(images)
        low = self.smaller(high)
        for _ in range(2):
            high, low = self.high(high), self.low(low)
            raised = F.interpolate(self.up(low), scale_factor=2.0, mode="nearest")
            high, low = (high + raised).relu(), (low + self.down(high)).relu()
        return F.mse_loss(self.maps(high), torch.rand(len(images), CLASSES, *high.shape[-2:]))


class DbNet(nn.Module):
    """Text regions by a threshold that is learned, too: arXiv:1911.08947."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = conv(3, 16, 3, 2), conv(16, 16, 3, 2)
        self.maps = nn.ModuleList(
            nn.Sequential(conv(32, 8), nn.ConvTranspose2d(8, 1, 2, 2), nn.Sigmoid())
            for _ in range(2)
        )

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        up = F.interpolate(self.coarse(fine), scale_factor=2.0, mode="nearest")
        text, threshold = (part(torch.cat([fine, up], 1)) for part in self.maps)
        regions = (1 + (-50 * (text - threshold)).exp()).reciprocal()
        wanted = torch.rand(text.shape).round()
        hard = F.binary_cross_entropy(text, wanted, reduction="none").flatten().topk(100).values
        overlap = (regions * wanted).sum() / (regions.sum() + wanted.sum() + 1e-6)
        return hard.mean() + 1 - 2 * overlap + F.l1_loss(threshold, wanted)


class StGcn(nn.Module):
    """Joints that exchange features along a skeleton, and time by convolution: arXiv:1801.07455."""

    def __init__(self, joints: int = 9, parts: int = 3) -> None:
        super().__init__()
        self.register_buffer("skeleton", torch.rand(parts, joints, joints).round())
        self.edges = nn.Parameter(torch.ones(parts, joints, joints))
        self.norm, self.mix = nn.BatchNorm1d(3 * joints), nn.Conv2d(3, 16 * parts, 1)
        self.time = nn.Sequential(
            nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, (9, 1), (2, 1), (4, 0)),
            nn.BatchNorm2d(16), nn.Dropout(0.1), nn.ReLU(),
        )  # fmt: skip
        self.classes = pooled_classifier(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.permute(0, 3, 1, 2).flatten(1, 2)).unflatten(1, (-1, 3))
        x = self.mix(x.permute(0, 2, 3, 1)).unflatten(1, (-1, 16))
        x = torch.einsum("nkctv,kvw->nctw", x, self.skeleton * self.edges)
        return self.classes(self.time(x))


class SlowFast(nn.Module):
    """A path of few frames and a narrow one of all, joined by a convolution: arXiv:1812.03982."""

    def __init__(self) -> None:
        super().__init__()

        def path(inner: int, outer: int, time: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv3d(inner, outer, (time, 3, 3), (1, 2, 2), (time // 2, 1, 1), bias=False),
                nn.BatchNorm3d(outer), nn.ReLU(),
            )  # fmt: skip

        self.slow, self.fast = path(3, 16, 1), path(3, 4, 5)
        self.pool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1))
        self.join = nn.Conv3d(4, 8, (5, 1, 1), (4, 1, 1), (2, 0, 0), bias=False)
        self.deeper = path(24, 32, 3)
        self.classes = nn.Sequential(nn.Dropout(0.5), nn.Linear(36, CLASSES))

    def forward(self, frames: Tensor) -> Tensor:
        slow, fast = self.pool(self.slow(frames[:, :, ::4])), self.pool(self.fast(frames))
        slow = self.deeper(torch.cat([slow, self.join(fast)], 1))
        pooled = [F.adaptive_avg_pool3d(part, 1).flatten(1) for part in (slow, fast)]
        return self.classes(torch.cat(pooled, 1))
