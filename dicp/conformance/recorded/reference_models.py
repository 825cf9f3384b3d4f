"""The reference models whose lists are committed, each at a small size, and one training step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicp.conformance.families.models import FAMILIES, Family, loss_of
from dicp.conformance.recorded import networks
from dicp.conformance.recorded.networks import CLASSES
from dicp.conformance.recorded.recorder import Recording, recording
from dicp.testing import torchvision_operators

BATCH = 2
NARROWER = 4
"""By how much torchvision's residual networks are narrower here."""
Step = tuple[nn.Module, Callable[[], Tensor]]
"""A model, and a function that computes its loss on one batch."""


@dataclass(frozen=True)
class ReferenceModel:
    """A model of the reference suite.

    domain: what it is for. about: what stands here under its name, and at what size.
    """

    domain: str
    about: str
    build: Callable[[], Step]


def recorded_model(name: str) -> Recording:
    """One training step of a reference model: forward, backward, and SGD with momentum."""
    torchvision_operators.define()
    model = MODELS[name]
    torch.manual_seed(0)
    module, loss = model.build()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, foreach=False)
    module.train()

    def steps() -> None:
        for _ in range(2):  # the second has momenta
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()

    return recording(name, {"domain": model.domain, "model": model.about}, steps)


def _library(name: str) -> Any:
    return importlib.import_module(name)


def _images(size: int, batch: int = BATCH, channels: int = 3) -> Tensor:
    return torch.rand(batch, channels, size, size)


def _classified(build: Callable[[], nn.Module], *shape: int) -> Step:
    """A classifier of inputs of the shape."""
    model, inputs = build(), torch.rand(BATCH, *shape)
    labels = torch.randint(CLASSES, (BATCH,))

    def loss() -> Tensor:
        found = model(inputs)
        return F.cross_entropy(getattr(found, "logits", found), labels)

    return model, loss


def _segmented(build: Callable[[], nn.Module], size: int = 32) -> Step:
    """A model that classifies pixels."""
    model, images = build(), _images(size)
    labels = torch.randint(CLASSES, (BATCH, size, size))

    def loss() -> Tensor:
        found = model(images)
        logits = found["out"] if isinstance(found, dict) else found
        return F.cross_entropy(logits, labels)

    return model, loss


def _own_loss(build: Callable[[], nn.Module], *inputs: Callable[[], Tensor]) -> Step:
    """A model that computes its loss."""
    model, given = build(), [make() for make in inputs]
    return model, lambda: model(*given)


def _narrow_resnet(depths: list[int], **options: Any) -> Any:
    """torchvision's bottleneck network with NARROWER layers."""
    resnet = _library("torchvision.models.resnet")

    class Narrow(resnet.ResNet):  # type: ignore[name-defined]
        def _make_layer(self, block: Any, planes: int, *args: Any, **words: Any) -> Any:
            return super()._make_layer(block, planes // NARROWER, *args, **words)

    model = Narrow(resnet.Bottleneck, depths, num_classes=CLASSES, **options)
    model.fc = nn.Linear(2048 // NARROWER, CLASSES)
    return model


R50, R101 = [3, 4, 6, 3], [3, 4, 23, 3]


def _vgg16() -> nn.Module:
    plan = [8, 8, "M", 16, 16, "M", 32, 32, 32, "M", 64, 64, 64, "M", 64, 64, 64, "M"]
    vgg = _library("torchvision.models.vgg")
    model: nn.Module = vgg.VGG(vgg.make_layers(plan), num_classes=CLASSES)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    head = (nn.Linear(64, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, CLASSES))
    model.classifier = nn.Sequential(*head)
    return model


def _efficientnet() -> nn.Module:
    models = _library("torchvision.models.efficientnet")
    plan = [models.MBConvConfig(*row, 1.0, 1.0) for row in (
        (1, 3, 1, 16, 8, 1), (6, 3, 2, 8, 16, 2), (6, 5, 2, 16, 24, 2),
    )]  # fmt: skip
    model: nn.Module = models.EfficientNet(plan, 0.2, num_classes=CLASSES, last_channel=64)
    return model


def _vit() -> nn.Module:
    library = _library("torchvision.models")
    model: nn.Module = library.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=CLASSES)
    return model


def _convnext() -> nn.Module:
    models = _library("torchvision.models.convnext")
    plan = [models.CNBlockConfig(16, 32, 2), models.CNBlockConfig(32, None, 1)]
    model: nn.Module = models.ConvNeXt(plan, 0.1, num_classes=CLASSES)
    return model


def _swin() -> nn.Module:
    model: nn.Module = _library("torchvision.models").SwinTransformer(
        [4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES
    )
    return model


def _densenet() -> nn.Module:
    model: nn.Module = _library("torchvision.models").DenseNet(
        8, (3, 3, 2, 2), 16, drop_rate=0.1, num_classes=CLASSES
    )
    return model


def _mobilenet_v3() -> nn.Module:
    model: nn.Module = _library("torchvision.models").mobilenet_v3_small(
        num_classes=CLASSES, width_mult=0.5
    )
    return model


def _shufflenet() -> nn.Module:
    model: nn.Module = _library("torchvision.models").ShuffleNetV2(
        [2, 2, 1], [24, 16, 32, 64, 64], num_classes=CLASSES
    )
    return model


def _inception() -> Step:
    models = _library("torchvision.models.inception")

    class Inception(nn.Module):
        """The stem and the first block of each kind."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                models.BasicConv2d(3, 16, kernel_size=3, stride=2), nn.MaxPool2d(3, 2),
                models.InceptionA(16, 8), models.InceptionB(232), models.InceptionC(712, 16),
            )  # fmt: skip
            self.classes = networks.pooled_classifier(768)

        def forward(self, x: Tensor) -> Tensor:
            return self.classes(self.body(x))

    return _classified(Inception, 3, 39, 39)


def _tsn() -> Step:
    def build() -> nn.Module:
        frames = _narrow_resnet([1, 1, 1, 1])

        class Segments(nn.Module):
            """The mean of what single frames say."""

            def __init__(self) -> None:
                super().__init__()
                self.frames = frames

            def forward(self, x: Tensor) -> Tensor:
                return self.frames(x.flatten(0, 1)).unflatten(0, (BATCH, -1)).mean(1)

        return Segments()

    return _classified(build, 3, 3, 32, 32)


def _deeppose() -> Step:
    model, images = _narrow_resnet([1, 1, 1, 1]), _images(32)
    joints = torch.rand(BATCH, CLASSES)
    return model, lambda: F.smooth_l1_loss(model(images), joints)


def _targets(size: int, masks: bool = False) -> list[dict[str, Tensor]]:
    """Two boxes in each image."""
    boxes = torch.tensor([[4.0, 4, 24, 28], [size / 2, size / 2, size - 4.0, size - 8]])
    found = {"boxes": boxes, "labels": torch.tensor([1, 2])}
    if masks:
        found["masks"] = torch.randint(2, (2, size, size), dtype=torch.uint8)
    return [dict(found) for _ in range(BATCH)]


def _detector(build: Callable[[Any, Any], nn.Module], size: int = 64, masks: bool = False) -> Step:
    """A detector of torchvision's over a narrow residual network with a pyramid of features."""
    detection = _library("torchvision.models.detection")
    utils = _library("torchvision.models.detection.backbone_utils")
    width = 256 // NARROWER
    backbone = utils.BackboneWithFPN(
        _narrow_resnet([1, 1, 1, 1], norm_layer=_library("torchvision.ops").FrozenBatchNorm2d),
        {"layer2": "0", "layer3": "1", "layer4": "2"}, [2 * width, 4 * width, 8 * width], 32,
    )  # fmt: skip
    model, targets = build(detection, backbone), _targets(size, masks)
    images = list(_images(size))
    if hasattr(model, "rpn"):
        model.rpn.filter_proposals = _best_proposals
    return model, lambda: torch.stack(list(model(images, targets).values())).sum()


def _best_proposals(proposals: Tensor, scores: Tensor, *_: Any) -> tuple[list[Tensor], list[Any]]:
    """The proposals with the highest scores, overlapping or not: `nms` is no ATen operator."""
    best = scores.detach().reshape(len(proposals), -1).topk(16).indices
    return [boxes[rows] for boxes, rows in zip(proposals, best, strict=True)], []


def _anchors(detection: Any, levels: int, ratios: tuple[float, ...] = (0.5, 1.0, 2.0)) -> Any:
    sizes = tuple((16 * 2**k,) for k in range(levels))
    generator = detection.anchor_utils.AnchorGenerator
    return generator(sizes, (ratios,) * levels)


_SMALL = {"num_classes": 3, "min_size": 64, "max_size": 64}
_REGIONS = {
    "rpn_batch_size_per_image": 16, "box_batch_size_per_image": 16, **_SMALL, "num_classes": None,
}  # fmt: skip


def _rcnn(name: str, detection: Any, backbone: Any) -> nn.Module:
    """Faster or Mask R-CNN with narrow heads."""
    module = detection.faster_rcnn
    heads = {
        "rpn_anchor_generator": _anchors(detection, 4),
        "box_head": module.TwoMLPHead(32 * 49, 64),
        "box_predictor": module.FastRCNNPredictor(64, 3),
    }
    if name == "MaskRCNN":
        mask = detection.mask_rcnn
        heads["mask_head"] = mask.MaskRCNNHeads(32, (32,), 1)
        heads["mask_predictor"] = mask.MaskRCNNPredictor(32, 16, 3)
    model: nn.Module = getattr(detection, name)(backbone, **heads, **_REGIONS)
    return model


def _retinanet(detection: Any, backbone: Any) -> nn.Module:
    model: nn.Module = detection.RetinaNet(
        backbone, anchor_generator=_anchors(detection, 4), **_SMALL
    )
    return model


def _fcos(detection: Any, backbone: Any) -> nn.Module:
    model: nn.Module = detection.FCOS(
        backbone, anchor_generator=_anchors(detection, 4, (1.0,)), **_SMALL
    )
    return model


def _ssd() -> Step:
    detection = _library("torchvision.models.detection")
    backbone = nn.Sequential(
        networks.conv(3, 16, 3, 2), networks.conv(16, 32, 3, 2), networks.conv(32, 32, 3, 2)
    )

    class Maps(nn.Module):
        """Features of two sizes."""

        out_channels = (32, 32)

        def __init__(self) -> None:
            super().__init__()
            self.fine, self.coarse = backbone, networks.conv(32, 32, 3, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            fine = F.normalize(self.fine(x))
            return {"0": fine, "1": self.coarse(fine)}

    boxes = detection.anchor_utils.DefaultBoxGenerator([[2], [2, 3]])
    head = detection.ssd.SSDHead([32, 32], boxes.num_anchors_per_location(), 3)
    model = detection.ssd.SSD(Maps(), boxes, (64, 64), 3, head=head)
    images, targets = list(_images(64)), _targets(64)
    return model, lambda: torch.stack(list(model(images, targets).values())).sum()


def _dilated(head: str) -> nn.Module:
    """FCN or DeepLabV3 of torchvision over a narrow network with dilation in place of strides."""
    segmentation = _library("torchvision.models.segmentation")
    body = _narrow_resnet([1, 1, 1, 1], replace_stride_with_dilation=[False, True, True])
    getter = _library("torchvision.models._utils").IntermediateLayerGetter
    heads = {
        "fcn": lambda: segmentation.fcn.FCNHead(512, CLASSES),
        "deeplabv3": lambda: segmentation.deeplabv3.DeepLabHead(512, CLASSES, (2, 4)),
    }
    kinds = {"fcn": segmentation.FCN, "deeplabv3": segmentation.DeepLabV3}
    model: nn.Module = kinds[head](getter(body, {"layer4": "out"}), heads[head]())
    return model


def _of_transformers(build: Callable[[Any], nn.Module], size: int, **labels: Any) -> Step:
    """A model of transformers that computes its loss on images with labels."""
    model, images = build(_library("transformers")), _images(size)

    def loss() -> Tensor:
        found: Tensor = model(pixel_values=images, **labels)["loss"]
        return found

    return model, loss


def _small_resnet(library: Any) -> Any:
    return library.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


def _detr() -> Step:
    def build(library: Any) -> nn.Module:
        config = library.DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
            backbone_config=library.ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
            ),
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=6,
            num_labels=CLASSES,
        )  # fmt: skip
        model: nn.Module = library.DetrForObjectDetection(config)
        return model

    boxes = torch.tensor([[0.3, 0.3, 0.2, 0.4], [0.6, 0.5, 0.3, 0.3]])
    labels = [{"class_labels": torch.tensor([1, 2]), "boxes": boxes} for _ in range(BATCH)]
    return _of_transformers(build, 64, labels=labels)


def _deeplabv3plus() -> Step:
    def build(library: Any) -> nn.Module:
        config = library.MobileNetV2Config(
            depth_multiplier=0.35, num_labels=CLASSES, output_stride=8
        )  # fmt: skip
        model: nn.Module = library.MobileNetV2ForSemanticSegmentation(config)
        return model

    return _of_transformers(build, 32, labels=torch.randint(CLASSES, (BATCH, 32, 32)))


def _upernet() -> Step:
    def build(library: Any) -> nn.Module:
        config = library.UperNetConfig(
            backbone_config=_small_resnet(library), hidden_size=32, auxiliary_channels=16,
            auxiliary_in_channels=32, num_labels=CLASSES, use_pretrained_backbone=False,
        )  # fmt: skip
        model: nn.Module = library.UperNetForSemanticSegmentation(config)
        return model

    return _of_transformers(build, 64, labels=torch.randint(CLASSES, (BATCH, 64, 64)))


def _family(family: Family) -> Step:
    model, batch = family.model(), family.labelled()
    return model, lambda: loss_of(model, batch)


def _pillars() -> Tensor:
    """Points of 12 columns; some columns have fewer than 8."""
    return torch.rand(12, 8, 9) * (torch.rand(12, 8, 1) > 0.3)


_TEXT = (lambda: torch.rand(BATCH, 1, 16, 32), lambda: torch.randint(1, CLASSES, (BATCH, 4)))
_IMAGE = (lambda: _images(32),)
_TV, _OWN = "torchvision's", "a small network of the same kind of layers"
_NARROW = f"{_TV}, layers {NARROWER} times as narrow"

_TABLE: Mapping[str, Mapping[str, tuple[str, Callable[[], Step]]]] = {
    "classification": {
        "resnet50": (_NARROW, lambda: _classified(lambda: _narrow_resnet(R50), 3, 64, 64)),
        "resnet101": (_NARROW, lambda: _classified(lambda: _narrow_resnet(R101), 3, 48, 48)),
        "mobilenet_v2": (
            f"{_TV}, a quarter of the width",
            lambda: _classified(lambda: _library("torchvision.models").MobileNetV2(
                CLASSES, 0.25), 3, 32, 32),
        ),
        "mobilenet_v3": (f"{_TV} small one, half as wide",
                         lambda: _classified(_mobilenet_v3, 3, 32, 32)),
        "seresnet50": (_OWN, lambda: _classified(networks.se_resnet, 3, 32, 32)),
        "shufflenet_v2": (f"{_TV}, narrow", lambda: _classified(_shufflenet, 3, 32, 32)),
        "vgg16": (f"{_TV}, narrow, head of width 64", lambda: _classified(_vgg16, 3, 32, 32)),
        "efficientnet": (f"{_TV}, three stages", lambda: _classified(_efficientnet, 3, 32, 32)),
        "vit": (f"{_TV}, two layers of width 64", lambda: _classified(_vit, 3, 32, 32)),
        "convnext": (f"{_TV}, two stages", lambda: _classified(_convnext, 3, 32, 32)),
        "swin_transformer": (f"{_TV}, two stages", lambda: _classified(_swin, 3, 32, 32)),
        "densenet": (f"{_TV}, ten layers", lambda: _classified(_densenet, 3, 32, 32)),
        "repvgg": (_OWN, lambda: _classified(networks.rep_vgg, 3, 32, 32)),
        "inceptionv3": (f"{_TV}, a block of three kinds", _inception),
    },
    "detection": {
        "faster_rcnn_r50": (f"{_NARROW}, one block of each; without nms",
                            lambda: _detector(partial(_rcnn, "FasterRCNN"))),
        "cascade_rcnn": ("Faster R-CNN, whose stage a cascade repeats; without nms",
                         lambda: _detector(partial(_rcnn, "FasterRCNN"), 96)),
        "mask_rcnn": (f"{_NARROW}, one block of each; without nms",
                      lambda: _detector(partial(_rcnn, "MaskRCNN"), masks=True)),
        "retinanet": (f"{_NARROW}, one block of each", lambda: _detector(_retinanet)),
        "fcos": (f"{_NARROW}, one block of each", lambda: _detector(_fcos)),
        "atss": ("FCOS, from which it differs by the choice of targets",
                 lambda: _detector(_fcos, 96)),
        "ssd300": (f"{_TV} head over three convolutions", _ssd),
        "detr": ("transformers', one layer each", _detr),
        "pointpillars": (_OWN, lambda: _own_loss(
            networks.PointPillars, _pillars, lambda: torch.randperm(256)[:12])),
        "yolov3": (_OWN, lambda: _own_loss(networks.darknet, *_IMAGE)),
        "yolov5": (_OWN, lambda: _own_loss(networks.csp_darknet, *_IMAGE)),
        "dyhead": (f"{_OWN}, without deformable convolutions",
                   lambda: _own_loss(networks.DynamicHead, *_IMAGE)),
        "solo": (_OWN, lambda: _own_loss(networks.Solo, *_IMAGE)),
        "centernet": (_OWN, lambda: _own_loss(networks.CenterNet, *_IMAGE)),
    },
    "segmentation": {
        "unet": (_OWN, lambda: _segmented(networks.UNet)),
        "pspnet": (_OWN, lambda: _segmented(networks.PyramidPooling)),
        "deeplabv3": (f"{_NARROW}, one block of each",
                      lambda: _segmented(partial(_dilated, "deeplabv3"))),
        "deeplabv3plus": ("transformers' MobileNetV2 with its head, a third of the width",
                          _deeplabv3plus),
        "upernet": ("transformers', over a small residual network", _upernet),
        "fcn": (f"{_NARROW}, one block of each", lambda: _segmented(partial(_dilated, "fcn"))),
    },
    "pose, text and video": {
        "hrnet": (_OWN, lambda: _own_loss(networks.HrNet, *_IMAGE)),
        "deeppose": (f"{_NARROW}, one block of each", _deeppose),
        "stgcn": (_OWN, lambda: _classified(networks.StGcn, 3, 16, 9)),
        "tsn": (f"{_NARROW}, one block of each, of three frames", _tsn),
        "slowfast": (_OWN, lambda: _classified(networks.SlowFast, 3, 8, 16, 16)),
        "crnn": (_OWN, lambda: _own_loss(networks.Crnn, *_TEXT)),
        "sar": (_OWN, lambda: _own_loss(networks.Sar, *_TEXT)),
        "dbnet": (_OWN, lambda: _own_loss(networks.DbNet, *_IMAGE)),
    },
    "large models": {
        "llama" if family.title == "llama2 7B" else str(family).lower(): (
            "transformers', two layers of width 32" if family.package else "two layers of width 32",
            partial(_family, family),
        )
        for family in FAMILIES
    },
}  # fmt: skip
"""Domain -> model -> what it is, and how it is built."""

MODELS: Mapping[str, ReferenceModel] = {
    name: ReferenceModel(domain, about, build)
    for domain, models in _TABLE.items()
    for name, (about, build) in models.items()
}
