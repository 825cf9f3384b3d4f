"""Let torchvision import beside a torch build that its own library does not load into."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch


def define() -> None:
    """Define the operators torchvision registers fake kernels for, where its library is absent.

    To be called before torchvision is imported; a second call does nothing.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define("torchvision::nms", boxes)
        torch.library.define("torchvision::qnms", boxes)
