"""A vendor's operator library: a library in C++ over the simulated chip, built here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dicp.oplib.reference import build
from dicp.oplib.text import header
from dicp.toolchain import find_compiler

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "dicp/device/native"

OPERATORS = r"""
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include "operator_library.h"
#include "runtime.h"

namespace {
struct Floats { float* at; diopiSize_t sizes; int64_t count; };

bool read(diopiConstTensorHandle_t tensor, Floats& to) {
  diopiDtype_t dtype;
  diopiSize_t strides;
  void* at;
  diopiGetTensorDtype(tensor, &dtype);
  diopiGetTensorData(const_cast<diopiTensorHandle_t>(tensor), &at);
  diopiGetTensorShape(tensor, &to.sizes);
  diopiGetTensorStride(tensor, &strides);
  diopiGetTensorNumel(tensor, &to.count);
  int64_t step = 1;
  for (int64_t d = to.sizes.len; d-- > 0; step *= to.sizes.data[d])
    if (to.sizes.data[d] > 1 && strides.data[d] != step) std::abort();
  to.at = static_cast<float*>(at);
  return dtype == diopi_dtype_float32;
}

int run(void* argument) {
  auto* task = static_cast<std::function<void()>*>(argument);
  (*task)();
  delete task;
  return 0;
}

// Puts the work into the queue of the current stream, as a chip does.
diopiError_t launch(diopiContextHandle_t context, const char* name, std::function<void()> work) {
  std::printf("CALLED %s\n", name);
  std::fflush(stdout);
  diopiStreamHandle_t stream;
  diopiGetStream(context, &stream);
  auto* task = new std::function<void()>(std::move(work));
  return dicp_rt_stream_launch(static_cast<dicp_rt_stream>(stream), &run, task, 1 << 30) == 0
             ? diopiSuccess : diopiErrorOccurred;
}

double number(const diopiScalar_t* value) {
  return value->stype == diopi_dtype_float64 ? value->fval : double(value->ival);
}
}  // namespace

extern "C" {
diopiError_t diopiAdd(diopiContextHandle_t c, diopiTensorHandle_t out, diopiConstTensorHandle_t a,
                      diopiConstTensorHandle_t b, const diopiScalar_t* alpha) {
  Floats x, y, z;
  if (!read(a, x) || !read(b, y) || !read(out, z)) return diopiDtypeNotSupported;
  if (x.count != y.count || x.count != z.count) return diopiNoImplement;
  const double factor = number(alpha);
  return launch(c, "diopiAdd", [=] {
    for (int64_t k = 0; k < z.count; ++k) z.at[k] = float(x.at[k] + factor * y.at[k]);
  });
}
diopiError_t diopiAddScalar(diopiContextHandle_t c, diopiTensorHandle_t out,
                            diopiConstTensorHandle_t a, const diopiScalar_t* b,
                            const diopiScalar_t* alpha) {
  Floats x, z;
  if (!read(a, x) || !read(out, z)) return diopiDtypeNotSupported;
  const double added = number(alpha) * number(b);
  return launch(c, "diopiAddScalar", [=] {
    for (int64_t k = 0; k < z.count; ++k) z.at[k] = float(x.at[k] + added);
  });
}
diopiError_t diopiMul(diopiContextHandle_t c, diopiTensorHandle_t out, diopiConstTensorHandle_t a,
                      diopiConstTensorHandle_t b) {
  Floats x, y, z;
  if (!read(a, x) || !read(b, y) || !read(out, z)) return diopiDtypeNotSupported;
  if (x.count == 13) return diopiErrorOccurred;
  if (x.count != y.count) return diopiNoImplement;
  return launch(c, "diopiMul", [=] {
    for (int64_t k = 0; k < z.count; ++k) z.at[k] = x.at[k] * y.at[k];
  });
}
const char* diopiGetLastErrorString() { return "thirteen elements"; }
diopiError_t diopiRelu(diopiContextHandle_t c, diopiTensorHandle_t out,
                       diopiConstTensorHandle_t a) {
  Floats x, z;
  if (!read(a, x) || !read(out, z)) return diopiDtypeNotSupported;
  return launch(c, "diopiRelu", [=] {
    for (int64_t k = 0; k < z.count; ++k) z.at[k] = x.at[k] > 0 ? x.at[k] : 0;
  });
}
diopiError_t diopiReluInp(diopiContextHandle_t c, diopiTensorHandle_t a) {
  Floats x;
  if (!read(a, x)) return diopiDtypeNotSupported;
  return launch(c, "diopiReluInp", [=] {
    for (int64_t k = 0; k < x.count; ++k) x.at[k] = x.at[k] > 0 ? x.at[k] : 0;
  });
}
diopiError_t diopiMm(diopiContextHandle_t c, diopiTensorHandle_t out, diopiConstTensorHandle_t a,
                     diopiConstTensorHandle_t b) {
  Floats x, y, z;
  if (!read(a, x) || !read(b, y) || !read(out, z)) return diopiDtypeNotSupported;
  const int64_t rows = x.sizes.data[0], depth = x.sizes.data[1], columns = y.sizes.data[1];
  return launch(c, "diopiMm", [=] {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        double total = 0;
        for (int64_t k = 0; k < depth; ++k) total += x.at[i * depth + k] * y.at[k * columns + j];
        z.at[i * columns + j] = float(total);
      }
  });
}
// The exponents are a tensor of the context.
diopiError_t diopiSoftmax(diopiContextHandle_t c, diopiTensorHandle_t out,
                          diopiConstTensorHandle_t a, int64_t dim) {
  Floats x, z, e;
  if (!read(a, x) || !read(out, z)) return diopiDtypeNotSupported;
  diopiTensorHandle_t exponents;
  if (diopiRequireTensor(c, &exponents, &x.sizes, nullptr, diopi_dtype_float32, diopi_device) != 0)
    return diopiErrorOccurred;
  read(exponents, e);
  if (x.count == 17) {  // more memory than there is
    diopiTensorHandle_t buffer;
    const auto status = diopiRequireBuffer(c, &buffer, int64_t(1) << 50, diopi_device);
    if (status != diopiSuccess) return status;
  }
  if (dim < 0) dim += x.sizes.len;
  int64_t inner = 1;
  for (int64_t d = dim + 1; d < x.sizes.len; ++d) inner *= x.sizes.data[d];
  const int64_t size = x.sizes.data[dim], outer = x.count / size / inner;
  return launch(c, "diopiSoftmax", [=] {
    for (int64_t i = 0; i < outer; ++i)
      for (int64_t j = 0; j < inner; ++j) {
        const int64_t first = i * size * inner + j;
        double total = 0;
        for (int64_t k = 0; k < size; ++k)
          total += e.at[first + k * inner] = std::exp(x.at[first + k * inner]);
        for (int64_t k = 0; k < size; ++k)
          z.at[first + k * inner] = float(e.at[first + k * inner] / total);
      }
  });
}
#ifdef WITH_LINEAR
diopiError_t diopiLinear(diopiContextHandle_t c, diopiTensorHandle_t out,
                         diopiConstTensorHandle_t a, diopiConstTensorHandle_t w,
                         diopiConstTensorHandle_t b) {
  Floats x, y, z, bias{};
  if (!read(a, x) || !read(w, y) || !read(out, z)) return diopiDtypeNotSupported;
  if (b) read(b, bias);
  const int64_t wide = y.sizes.data[0], depth = y.sizes.data[1], rows = x.count / depth;
  return launch(c, "diopiLinear", [=] {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < wide; ++j) {
        double total = bias.at ? bias.at[j] : 0;
        for (int64_t k = 0; k < depth; ++k) total += x.at[i * depth + k] * y.at[j * depth + k];
        z.at[i * wide + j] = float(total);
      }
  });
}
#endif
}
"""

PROGRAM = """
import torch, torch_dipu
import torch.nn.functional as F
from torch_dipu import dipu

torch.manual_seed(0)
a, b, w, bias = torch.randn(3, 4), torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
def square(t):
    return t.view(-1)[:9].view(3, 3)

CALLS = {
    "add": lambda a, b, w, bias: a + b,
    "gaps": lambda a, b, w, bias: torch.add(a[:, ::2], b[:, 1::2], alpha=2),
    "a number": lambda a, b, w, bias: a + 3,
    "a number in place": lambda a, b, w, bias: a.add_(0.5, alpha=3),
    "in place": lambda a, b, w, bias: a.add_(b),
    "part in place": lambda a, b, w, bias: a.t().add_(b.t()),
    "onto itself": lambda a, b, w, bias: torch.mul(a, b, out=b),
    "product onto an operand": lambda a, b, w, bias: torch.mm(
        a[:, :3], square(b), out=square(b.clone() if b.is_cpu else b)),
    "given": lambda a, b, w, bias: torch.add(a, b, out=torch.empty(0, device=a.device)),
    "wider": lambda a, b, w, bias: torch.add(a, b, out=a.new_empty(3, 4, dtype=torch.float64)),
    "broadcast": lambda a, b, w, bias: a + b[0],
    "double": lambda a, b, w, bias: a.double() + b.double(),
    "promoted": lambda a, b, w, bias: a + b.int(),
    "complex": lambda a, b, w, bias: a + b * 1j,
    "host number": lambda a, b, w, bias: a + torch.tensor(2.0),
    "empty": lambda a, b, w, bias: a[:0] + b[:0],
    "relu": lambda a, b, w, bias: F.relu(a.t()),
    "relu in place": lambda a, b, w, bias: F.relu_(a),
    "product": lambda a, b, w, bias: a @ b.t(),
    "softmax": lambda a, b, w, bias: torch.softmax(a, -1) + torch.softmax(a, 0),
    "linear": lambda a, b, w, bias: F.linear(a, w, bias),
    "linear of a vector": lambda a, b, w, bias: F.linear(a[0], w),
    "linear of doubles": lambda a, b, w, bias: F.linear(a.double(), w.double(), bias.double()),
    "channels last": lambda a, b, w, bias: F.relu(
        a.reshape(1, 2, 2, 3).to(memory_format=torch.channels_last)),
}
for name, call in CALLS.items():
    want = call(a.clone(), b.clone(), w, bias)
    for attempt in range(2):
        got = call(a.to("dipu"), b.to("dipu"), w.to("dipu"), bias.to("dipu"))
        torch.testing.assert_close(got.cpu(), want, msg=lambda text: f"{name}: {text}")
        assert got.stride() == want.stride(), (name, got.stride())

def trained(place):
    leaves = [t.to(place).detach().requires_grad_() for t in (a, w, bias)]
    loss = F.softmax(F.relu(F.linear(*leaves)), -1).square().sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    return [g.cpu() for g in (*grads, *torch.autograd.grad(grads[0].square().sum(), leaves[:2]))]

for got, want in zip(trained("dipu"), trained("cpu")):
    torch.testing.assert_close(got, want)

side, x = dipu.Stream(), torch.ones(4, device="dipu")
y = x + x
with dipu.stream(side):
    dipu._sleep(50_000_000)
    y = x + x  # waits in the queue
    assert not side.query()
side.synchronize()
assert y.cpu().tolist() == [2.0] * 4

print("DUMP", flush=True)
with dipu.dump_op_args(1):
    torch.add(x, x)
    torch.add(x, 1)
    torch.sub(x, x)
try:
    torch.ones(13, device="dipu") * torch.ones(13, device="dipu")
except RuntimeError as error:
    print("ERROR", error)
try:
    torch.softmax(torch.ones(17, device="dipu"), 0)
except torch.OutOfMemoryError as error:
    assert "out of memory: requested" in str(error), error
else:
    raise AssertionError("memory without end")
integers = torch.ones(2, dtype=torch.int64, device="dipu")
try:
    torch.add(x[:2], 1.5, out=integers)
except RuntimeError as error:
    assert "can't be cast" in str(error), error
else:
    raise AssertionError("a result was narrowed")
gone = torch.ones(4, device="dipu")
gone.untyped_storage().resize_(0)
try:
    gone + x
except RuntimeError as error:
    assert "use after free" in str(error), error
else:
    raise AssertionError("freed memory was read")
with torch.profiler.profile(record_shapes=True) as profile:
    torch.mul(x, x)
rows = {row.key: row for row in profile.key_averages(group_by_input_shape=True)}
assert rows["diopiMul"].count == rows["dipu_mul"].count == 1, rows.keys()
assert rows["dipu_mul"].input_shapes[:2] == [list(x.shape)] * 2, rows["dipu_mul"].input_shapes
from typer.testing import CliRunner
from dicp.cli import app
print(CliRunner().invoke(app, ["device", "ops"], terminal_width=200).output)
print("COUNTS", sorted(name for (name, path) in dipu.path_counts() if path == "operator library"))
"""


def _vendor(folder: Path, runtime: Path, operators: Path) -> dict[str, str]:
    """An installed package of a runtime and an operator library, and what to set for its device."""
    info = folder / "droplet-1.0.dist-info"
    info.mkdir(exist_ok=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: droplet\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text(
        "[dicp.devices]\ndroplet = droplet:runtime\n"
        "[dicp.operator_libraries]\ndroplet = droplet:operators\n"
    )
    folder.joinpath("droplet.py").write_text(
        f"def runtime():\n    return {str(runtime)!r}\n"
        f"def operators():\n    return {str(operators)!r}\n"
    )
    return {"PYTHONPATH": str(folder), "DIPU_DEVICE": "droplet", "DIPU_MOCK_CUDA": "0"}


def _built(name: str, source: Path, folder: Path, *arguments: str) -> Path:
    command, _ = find_compiler("the test's chip", "")
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", f"-I{NATIVE}", "-o", name]
    subprocess.run([*command, *options, str(source), *arguments], check=True, cwd=folder)
    return folder / name


def _chip(folder: Path, *definitions: str) -> dict[str, str]:
    runtime = _built("libruntime.so", NATIVE / "simulator.cpp", folder)
    source = folder / "operators.cpp"
    source.write_text(OPERATORS)
    flags = [f"-D{name}" for name in definitions]
    return _vendor(folder, runtime, _built("liboperators.so", source, folder, *flags, str(runtime)))


def test_operators_take_the_library(run: Any, tmp_path: Path) -> None:
    """Values, layouts, streams, gradients, dumps, errors; whole `linear`, missing functions."""
    lines = run(PROGRAM, **_chip(tmp_path, "WITH_LINEAR")).stdout.splitlines()
    assert lines[0] == "diopi dyload init"
    assert re.fullmatch(
        r"(\S+) lacks \d+ functions, whose operators take other paths; "
        r"python -m dicp\.oplib missing \1", lines[1],
    ), lines[1]  # fmt: skip
    called = {line.removeprefix("CALLED ") for line in lines if line.startswith("CALLED")}
    assert called == {
        "diopiAdd", "diopiAddScalar", "diopiMul", "diopiRelu", "diopiReluInp", "diopiMm",
        "diopiSoftmax", "diopiLinear",
    }  # fmt: skip
    dumped = [line for line in lines[lines.index("DUMP") :] if line.startswith("[dipu_")]
    assert [line.split("  ")[1] for line in dumped] == ["diopiAdd", "diopiAddScalar", "sub.out"]
    assert re.fullmatch(r"\[dipu_add_out:\d+\]:add.out  diopiAdd", dumped[0]), dumped
    (error,) = (line for line in lines if line.startswith("ERROR"))
    assert "diopiMul for mul.Tensor of torch.float32 [13], torch.float32 [13]" in error
    assert "failed with status 1: thirteen elements" in error, error
    rows = {row[0]: row[1:] for line in lines if (row := line.replace("│", " ").split())}
    assert rows["add.out"][:3] == ["operator", "library:", "diopiAdd"]
    assert rows["linear"][:3] == ["operator", "library:", "diopiLinear"]
    assert rows["sub.out"][0] == "compiled"
    (counts,) = (line for line in lines if line.startswith("COUNTS"))
    assert "'linear'" in counts and "'mm.out'" in counts and "'relu_'" in counts, counts


PARTS = """
import torch, torch_dipu
x, w = torch.randn(3, 4, device="dipu"), torch.randn(5, 4, device="dipu")
out = torch.nn.functional.linear(x, w)
torch.testing.assert_close(out.cpu(), x.cpu() @ w.cpu().t())
print("PARTS", torch_dipu.dipu.path_counts())
"""


def test_parts_of_a_composite_operator_and_no_library(run: Any, tmp_path: Path) -> None:
    """Without `linear` its product takes the library; DIPU_WITH_DIOPI_LIBRARY=DISABLE: nothing."""
    chip = _chip(tmp_path)
    printed = run(PARTS, **chip).stdout
    assert "CALLED diopiMm" in printed and "('mm.out', 'operator library')" in printed, printed
    printed = run(PARTS, DIPU_WITH_DIOPI_LIBRARY="DISABLE", **chip).stdout
    assert "diopi" not in printed and "operator library" not in printed, printed


def test_a_library_without_operators(run: Any, tmp_path: Path) -> None:
    """An object that has none of the functions, or that the loader refuses, is an error."""
    library = _built("libruntime.so", NATIVE / "simulator.cpp", tmp_path)
    done = run(PARTS, ok=False, **_vendor(tmp_path, library, library))
    assert f"The operator library {library}: it has none of diopiAbs" in done.stderr, done.stderr
    done = run(PARTS, ok=False, **_vendor(tmp_path, library, tmp_path / "none.so"))
    assert "none.so: cannot open shared object file" in done.stderr, done.stderr


REFERENCE = """
from pathlib import Path
import droplet, torch, torch_dipu
import torch.nn.functional as F
from dicp.oplib.reference import ReferenceLibrary
from torch_dipu import dipu

torch.manual_seed(0)
library = ReferenceLibrary(Path(droplet.operators()), backend=None)
x, y, image = torch.randn(3, 4), torch.rand(3, 4) + 0.5, torch.randn(2, 3, 6, 6)
mask, rows = torch.randn(3, 4) > 0, torch.tensor([2, 0])
weight, volume = torch.randn(4, 3, 3, 3), torch.randn(1, 2, 3, 4, 5)

def leaf(t):
    return t.detach().clone().requires_grad_()

def gradients(fn, *inputs):
    inputs = [leaf(t) for t in inputs]
    out = fn(*inputs)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

def statistics(t):
    norm = torch.nn.BatchNorm2d(3, device=t.device)
    return [norm(t).detach(), norm.running_mean, norm.running_var, norm.eval()(t).detach()]

def other_memory(t):  # what is written beside the results lies in memory with gaps
    mean, var = torch.zeros(6, device=t.device)[::2], torch.ones(6, device=t.device)[::2]
    return [F.batch_norm(t, mean, var, training=True), mean, var]

CALLS = {
    "a string": (lambda x: gradients(lambda t: F.gelu(t, approximate="tanh"), x), x),
    "numbers": (lambda x: gradients(lambda t: F.hardtanh(t, -0.5, 0.7), x), x),
    "no number": (lambda x: [x.clamp(min=0.1), x.clamp(max=0), x.clamp_(-1, 1)], x),
    "no tensor": (lambda x, y: torch.clamp(x, max=y), x, y),
    "rounding": (lambda x, y: [torch.div(x, y, rounding_mode=mode)
                               for mode in ("floor", "trunc", None)], x, y),
    "a number for a tensor": (lambda x: [x // 2, x / 4, x.sub(3, alpha=2), x % 2], x),
    "a number first": (lambda x: [2 ** x, 5 % (x.abs() + 1)], x),
    "in place": (lambda x, y: [x.mul_(y), x.pow_(y), x.sub_(1), x.ge_(0), x.div_(2)], y, y),
    "of its own result": (lambda x: x.sigmoid_().mul_(x), x),
    "beta and alpha": (lambda t: torch.baddbmm(t, t, t, beta=2, alpha=0.5), image[0]),
    "convolution": (lambda i, w: gradients(
        lambda a, b: F.conv2d(a, b, stride=2, padding=(1, 0)), i, w), image, weight),
    "bias": (lambda i, w, b: gradients(F.conv2d, i, w, b), image, weight, torch.randn(4)),
    "transposed": (lambda i, w: gradients(lambda a, b: F.conv_transpose2d(
        a, b, stride=2, padding=1, output_padding=1, dilation=2), i, w), image,
        weight.transpose(0, 1)),
    "three dimensions": (lambda v: gradients(
        lambda t: F.max_pool3d(F.conv3d(t, t[:, :, :2, :2, :2]), 2, 1), v), volume),
    "pooling": (lambda i: gradients(lambda t: F.avg_pool2d(
        t, 3, 2, 1, count_include_pad=False, divisor_override=5), i), image),
    "channels last": (lambda i: gradients(lambda t: F.max_pool2d(t, 2), i),
                      image.to(memory_format=torch.channels_last)),
    "sizes": (lambda i: F.fold(F.unfold(i, 2, padding=1), (6, 6), 2, padding=1), image),
    "modes": (lambda i: [F.interpolate(i, size=(4, 9), mode="bilinear", align_corners=True),
                         F.interpolate(i, size=(4, 9)), F.pad(i, (1, 2), value=7),
                         F.pad(i, (1, 1, 2, 0), mode="reflect")], image),
    "a scale": (lambda i: F.interpolate(i, scale_factor=1.5), image),
    "three results": (lambda x: gradients(
        lambda t: F.layer_norm(t, (4,), t[0], t[1]), x), x),
    "groups": (lambda i: gradients(lambda t: F.group_norm(t, 3), i), image),
    "in evaluation": (lambda i, v: [*torch.native_batch_norm(i, None, None, v, v, False, 0, 1e-5),
                                    *gradients(lambda t: F.batch_norm(t, v, v), i)],
                      image, torch.rand(3) + 0.5),
    "statistics": (statistics, image), "statistics with gaps": (other_memory, image),
    "kept dimensions": (lambda x: [x.mean(0, keepdim=True), x.sum(), x.sum((0, 1)),
                                   x.prod(1), x.std(1), x.std(0, correction=0),
                                   torch.ops.aten.std.correction(x, [0])], x),
    "two corrections": (lambda x: x.std(0, correction=2), x),
    "dtypes": (lambda x: [x.sum(0, dtype=torch.float64), torch.softmax(x, -1)], x.half()),
    "any": (lambda m: [m.any(), m.any(0), m.all(1, keepdim=True)], mask),
    "indices": (lambda x: [*x.max(1), *x.sort(stable=True), *x.topk(2, 0), x.argmax(),
                           x.argmax(1, keepdim=True)], x),
    "lists": (lambda x, y: torch.cat([x, y, x[:1]]), x, y),
    "absent indices": (lambda x, r: torch.ops.aten.index_put(
        x, [None, r], x[:, :2]), x, rows),
    "added up": (lambda x, r: torch.index_put(x, (r,), x[:2], accumulate=True), x, rows),
    "reduce": (lambda x, r: [x.scatter(0, r[None].expand(2, 2), x),
                             x.scatter(0, r[None], 1.5, reduce="multiply")], x, rows),
    "loss": (lambda x, t: [*gradients(lambda a: F.cross_entropy(a, t, ignore_index=3), x),
                           *gradients(lambda a: F.mse_loss(a, a.detach() * 2), x)],
             x, torch.tensor([3, 0, 1])),
    "embedding": (lambda w, i: F.embedding(i, w, padding_idx=1), x, rows),
    "swapped": (lambda x: torch.linalg.qr(x), x), "of a range": (lambda x: torch.linspace(
        0, 1, 7, device=x.device) + torch.arange(1, 8, device=x.device), x),
    "as in ATen": (lambda x, y: [torch.hypot(x, y), x.logsumexp(0), x.round(decimals=1),
                                 *torch.aminmax(x, dim=1), x.nan_to_num(posinf=1.0)], x, y),
    "twice": (lambda x: torch.autograd.functional.hessian(lambda t: F.silu(t).sum(), x), x),
}
OTHER_PATHS = {"a scale", "two corrections"}

def checked(name):
    call, *inputs = CALLS[name]
    before = sum(dipu.path_counts()[key] for key in dipu.path_counts() if "library" in key[1])
    found = call(*(t.clone().to("dipu") for t in inputs))
    after = sum(dipu.path_counts()[key] for key in dipu.path_counts() if "library" in key[1])
    assert (after > before) == (name not in OTHER_PATHS), (name, dipu.path_counts())
    wanted = call(*(t.clone() for t in inputs))
    pairs = zip(*([t] if isinstance(t, torch.Tensor) else t for t in (found, wanted)), strict=True)
    for got, want in pairs:
        assert (got.dtype, got.stride()) == (want.dtype, want.stride()), (name, got.stride())
        torch.testing.assert_close(got.cpu(), want, msg=lambda text: f"{name}: {text}")

for name in CALLS:
    checked(name)
library.backend = "dicp"
for name in ("in place", "lists", "three results"):
    checked(name)
"""


def test_arguments_reach_every_kind_of_parameter(run: Any, tmp_path: Path) -> None:
    """C functions read what the header declares; eager and compiled graphs compute the results."""
    runtime = _built("libruntime.so", NATIVE / "simulator.cpp", tmp_path)
    run(REFERENCE, **_vendor(tmp_path, runtime, build(tmp_path / "reference")))


BY_HAND = """
import torch, torch_dipu
from torch_dipu import dipu
for shape, dims in (((2, 1300, 3), (0, 1, -1)), ((5,), (0, -1)), ((3, 0), (1,))):
    x = torch.randn(shape)
    for dim in dims:
        torch.testing.assert_close(torch.softmax(x.to("dipu"), dim).cpu(), torch.softmax(x, dim))
assert dipu.path_counts()["_softmax.out", "operator library"] == 6, dipu.path_counts()
"""


def test_the_page_s_example(run: Any, tmp_path: Path) -> None:
    """The softmax of docs/operator_library.md, built with the two headers alone."""
    page = ROOT.joinpath("docs/operator_library.md").read_text()
    (source,) = re.findall(r"```cpp\n(.*?)```", page, re.S)
    tmp_path.joinpath("functions.h").write_text(header())
    tmp_path.joinpath("softmax.cpp").write_text(source)
    library = _built("libdiopi_impl.so", tmp_path / "softmax.cpp", tmp_path, f"-I{tmp_path}")
    runtime = _built("libruntime.so", NATIVE / "simulator.cpp", tmp_path)
    run(BY_HAND, DIPU_SYNC_EXEC_MODE="1", **_vendor(tmp_path, runtime, library))
