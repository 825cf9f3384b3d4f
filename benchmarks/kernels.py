"""`kernels`: functions bound by memory, beside a copy that moves as many bytes.

copy: the time of a copy of as many bytes as the kernel has to read and write at least, measured in
turn with it. small fits into the second-level cache, medium into the last, large into none. The
allocator is told to keep what is freed: fresh pages would cost several times the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from benchmarks import child
from benchmarks.backends import EAGER, parse
from benchmarks.measure import alternate
from benchmarks.options import Options, chosen
from benchmarks.report import Progress, Report, Row
from dicp.testing.accuracy import InDouble, errors, named_tensors, to_double

SIZES = {
    "cpu": {"small": 1 << 16, "medium": 1 << 20, "large": 1 << 24},
    "cuda": {"small": 1 << 20, "medium": 1 << 23, "large": 1 << 27},
}
"""Elements of a kernel's main tensor."""

WIDTH = 1024
"""The length of a row: hidden size, classes of a softmax."""

COPY = "copy"

KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc's settings for an allocator that reuses its pages."""


@dataclass(frozen=True)
class Kernel:
    """A function of tensors; `inputs(n)` creates them with about n elements in the main one.

    `written` lists the positions of arguments that the function updates: they are read and written.
    """

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[int], Sequence[Tensor]]
    written: tuple[int, ...] = ()


def _rows(n: int) -> Tensor:
    return torch.randn(n // WIDTH, WIDTH)


def _vector() -> Tensor:
    return torch.rand(WIDTH) + 0.5


def _images(n: int) -> Tensor:
    return torch.randn(n // 16384, 64, 16, 16)


def _cube(n: int) -> Tensor:
    return torch.randn(n // 16384, 128, 128)


def _norm(n: int) -> tuple[Tensor, ...]:
    return _rows(n), _vector(), _vector()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight, bias)


def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [WIDTH], weight, bias, 1e-5)
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, [WIDTH], mean, rstd, weight, bias, [True, True, True]
    )


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide, back = x.float(), grad.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    normal = wide * scale
    inner = back * weight.float()
    moved = (inner - normal * (inner * normal).mean(-1, keepdim=True)) * scale
    return moved.to(x.dtype), (back * normal).sum(0).to(weight.dtype)


def cross_entropy_backward(x: Tensor, classes: Tensor) -> Tensor:
    """The gradient of the mean loss, from the scores."""
    found = torch.softmax(x.float(), -1)
    hit = torch.arange(x.shape[-1], device=x.device) == classes[:, None]
    return ((found - hit.float()) / x.shape[0]).to(x.dtype)


def softmax_backward(grad: Tensor, result: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, result, -1, result.dtype)


def batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, training=True)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def adam(parameter: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
    mean.mul_(0.9).add_(grad, alpha=0.1)
    square.mul_(0.999).addcmul_(grad, grad, value=0.001)
    parameter.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)


def sgd(parameter: Tensor, grad: Tensor, momentum: Tensor) -> None:
    momentum.mul_(0.9).add_(grad)
    parameter.add_(momentum, alpha=-1e-3)


def embedding_backward(grad: Tensor, index: Tensor) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, index, 4096, -1, False)


def residual_norm(
    x: Tensor, residual: Tensor, keep: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Dropout, residual and norm; the mask is an input, so that results can be compared."""
    total = residual + x * keep / 0.9
    return F.layer_norm(total, (WIDTH,), weight, bias), total


def _positive(n: int, count: int) -> list[Tensor]:
    return [torch.rand(n) * 0.1 + 0.01 for _ in range(count)]


def _attention_heads(n: int) -> tuple[Tensor, ...]:
    angles = torch.randn(128, 64)
    return torch.randn(n // (8 * 128 * 64) or 1, 8, 128, 64), angles.cos(), angles.sin()


def _residual(n: int) -> tuple[Tensor, ...]:
    return _rows(n), _rows(n), (_rows(n) > -1).float(), _vector(), _vector()


def _channels(n: int) -> tuple[Tensor, ...]:
    return _images(n), torch.zeros(64), torch.ones(64), torch.rand(64), torch.rand(64)


KERNELS = (
    Kernel("softmax", lambda x: x.softmax(-1), lambda n: [_rows(n)]),
    Kernel("log_softmax", lambda x: x.log_softmax(-1), lambda n: [_rows(n)]),
    Kernel("layer_norm", layer_norm, _norm),
    Kernel("layer_norm_backward", layer_norm_backward, lambda n: [_rows(n), *_norm(n)]),
    Kernel("rms_norm", rms_norm, lambda n: [_rows(n), _vector()]),
    Kernel("rms_norm_backward", rms_norm_backward, lambda n: [_rows(n), _rows(n), _vector()]),
    Kernel("softmax_backward", softmax_backward, lambda n: [_rows(n), _rows(n).softmax(-1)]),
    Kernel(
        "group_norm",
        lambda x, weight, bias: F.group_norm(x, 8, weight, bias),
        lambda n: [_images(n), torch.rand(64), torch.rand(64)],
    ),
    Kernel("batch_norm_training", batch_norm, _channels, written=(1, 2)),
    Kernel("gelu", F.gelu, lambda n: [_rows(n)]),
    Kernel("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), lambda n: [_rows(n)]),
    Kernel("swiglu", lambda x, gate: F.silu(gate) * x, lambda n: [_rows(n), _rows(n)]),
    Kernel(
        "cross_entropy",
        F.cross_entropy,
        lambda n: [_rows(n), torch.randint(0, WIDTH, (n // WIDTH,))],
    ),
    Kernel(
        "cross_entropy_backward",
        cross_entropy_backward,
        lambda n: [_rows(n), torch.randint(0, WIDTH, (n // WIDTH,))],
    ),
    Kernel("rotary", rotary, _attention_heads),
    Kernel("adam", adam, lambda n: _positive(n, 4), written=(0, 2, 3)),
    Kernel("sgd", sgd, lambda n: _positive(n, 3), written=(0, 2)),
    Kernel(
        "embedding_backward",
        embedding_backward,
        lambda n: [_rows(n), torch.randint(0, 4096, (n // WIDTH,))],
    ),
    Kernel("sum_rows", lambda x: x.sum(-1), lambda n: [_rows(n)]),
    Kernel("sum_columns", lambda x: x.sum(0), lambda n: [_rows(n)]),
    Kernel("sum_middle", lambda x: x.sum(1), lambda n: [_cube(n)]),
    Kernel("sum_all", lambda x: x.sum(), lambda n: [_rows(n)]),
    Kernel("amax_rows", lambda x: x.amax(-1), lambda n: [_rows(n)]),
    Kernel("argmax_rows", lambda x: x.argmax(-1), lambda n: [_rows(n)]),
    Kernel("cumsum_rows", lambda x: x.cumsum(-1), lambda n: [_rows(n)]),
    Kernel("transpose", lambda x: x.t().contiguous(), lambda n: [_rows(n)]),
    Kernel("transpose_inner", lambda x: x.transpose(1, 2).contiguous(), lambda n: [_cube(n)]),
    Kernel(
        "to_channels_last",
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda n: [_images(n)],
    ),
    Kernel("cat", lambda x, y: torch.cat((x, y), -1), lambda n: [_rows(n), _rows(n)]),
    Kernel("split", lambda x: [part * 2 for part in x.split(256, -1)], lambda n: [_rows(n)]),
    Kernel("residual_norm", residual_norm, _residual),
)


def find(names: tuple[str, ...]) -> list[Kernel]:
    """The named kernels, all without names; OptionError on a wrong one."""
    return chosen("kernels", KERNELS, names)


def bytes_moved(kernel: Kernel, inputs: Sequence[Tensor], results: Any) -> int:
    """Bytes that any implementation reads and writes: inputs, results, updated inputs twice."""
    outputs = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
    tensors = [*inputs, *outputs, *(inputs[place] for place in kernel.written)]
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(
    kernel: str, backends: list[str], dtype: str, device: str, seconds: float
) -> dict[str, Any]:
    """One kernel at every size on every backend, in this process."""
    return {
        size: measure_size(find((kernel,))[0], elements, backends, dtype, device, seconds)
        for size, elements in SIZES[device].items()
    }


def measure_size(
    kernel: Kernel, elements: int, backends: list[str], dtype: str, device: str, seconds: float
) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch.device(device):
        made = list(kernel.inputs(elements))
    inputs = pytree.tree_map_only(
        Tensor,
        lambda t: t.to(device, getattr(torch, dtype) if t.is_floating_point() else t.dtype),
        made,
    )
    with torch.inference_mode(False), torch.no_grad():
        moved = bytes_moved(kernel, inputs, kernel.fn(*to_copies(inputs)))
        with InDouble():
            reference = results(kernel.fn, to_double(inputs))
        eager = results(kernel.fn, to_copies(inputs))
        runs, wrong, failures = {}, {}, {}
        for label in dict.fromkeys([EAGER, *backends]):
            compiled = parse(label).compile(kernel.fn)
            try:
                found = errors(results(compiled, to_copies(inputs)), eager, reference)
            except Exception as error:  # a backend that fails does not stop the others
                failures[label] = f"{type(error).__name__}: {error}"[:2000]
                continue
            wrong.update((label, str(e)) for e in found if not e.ok)
            own = to_copies(inputs)
            runs[label] = lambda compiled=compiled, own=own: compiled(*own)
        source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        runs[COPY] = lambda: target.copy_(source)
        samples = alternate(runs, seconds, device)
    return {
        "bytes": moved,
        "samples": {label: asdict(sample) for label, sample in samples.items()},
        "wrong": wrong,
        "failures": failures,
    }


def to_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def results(fn: Callable[..., Any], inputs: list[Tensor]) -> dict[str, Tensor]:
    """What the function returns, and its inputs afterwards: some kernels update them."""
    return named_tensors((fn(*inputs), inputs))


def run(options: Options, report: Report, progress: Progress) -> None:
    """Every kernel and dtype at every size."""
    report.unit, report.floors, report.group_by = "µs", ("copy",), "size"
    report.note = (__doc__ or "").partition("\n\n")[2]
    cases = [(k, d) for d in options.dtypes for k in find(options.names)]
    for kernel, dtype in progress.over(cases, lambda case: case[0].name):
        rows = {s: Row(kernel.name, {"size": s, "dtype": dtype}) for s in SIZES[options.device]}
        report.rows.extend(rows.values())
        arguments = {
            "kernel": kernel.name,
            "backends": list(options.backends),
            "dtype": dtype,
            "device": options.device,
            "seconds": 0.1 if options.quick else 0.5,
        }
        try:
            found = child.run("kernel", arguments, KEEP_FREED_MEMORY)
        except child.ChildFailed as error:
            for row in rows.values():
                row.failures = dict.fromkeys(options.backends, str(error))
            continue
        for size, result in found.items():
            row, samples = rows[size], result["samples"]
            row.floors["copy"] = copy = samples.pop(COPY)["median"] * 1e6
            row.take_samples(samples, scale=1e6)
            row.wrong, row.failures = result["wrong"], result["failures"]
            row.detail = {
                "bytes": result["bytes"],
                "copy bytes per second": result["bytes"] / copy * 1e6,
            }
