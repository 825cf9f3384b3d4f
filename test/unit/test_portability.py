"""Generated kernels on other levels of x86, by clang, without OpenMP, and on 64-bit ARM."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from standalone import Standalone
from torch import Tensor

from dicp.compare import assert_matches
from dicp.config import Config
from dicp.vendor.cpu.routines.common import GROUPS, Group
from dicp.vendor.cpu.toolchain import NO_GATHER, find_toolchain
from dicp.vendor.cpu.units import header_texts, unit_text

FEATURES = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
ARM = "aarch64-linux-gnu-g++"
RUN_ARM = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


def sample(x: Tensor, y: Tensor, h: Tensor, i: Tensor, d: Tensor) -> list[Tensor]:
    """Every kind of kernel and loop, and the functions that are not the C library's."""
    return [
        F.gelu(x) * y.sigmoid() + x.tanh(), (x.erf() - y.exp()).sin() / (y.abs().log1p() + 1),
        x.softmax(1), F.layer_norm(x, x.shape[1:]), x.sum(0), (x * y).sum(1), x.cos().argmax(1),
        x.argmin(0), *(x + y).max(1), x.cumsum(1), (x > y).to(torch.int32).cumsum(0),
        x.t().contiguous() + 1, h.float() * 2, (h * h.exp()).to(torch.bfloat16), i // 7 % 5,
        h / 3, h.sum(0), h.softmax(1),
        (x * 1e10).to(torch.int32), x.pow(3).rsqrt().nan_to_num(7), d.atan2(d.t()).sum(1), d.exp(),
        torch.cat([x, y], 1).roll(3, 1), F.max_pool2d(x[None], 2), x.amax(0), x.var(1),
        x.new_zeros(9, 65).index_add(0, i[:, 0].abs() % 9, x[: len(i)]), x.logsumexp(1),
    ]  # fmt: skip


@functools.cache
def program() -> tuple[Standalone, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    inputs = [torch.randn(70, 65), torch.randn(70, 65), torch.randn(40, 31).half()]
    inputs += [torch.randint(-99, 99, (40, 33)), torch.randn(50, 50, dtype=torch.float64)]
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    return Standalone(sample, inputs), sample(*inputs), sample(*wide)


def check(folder: Path, command: Sequence[str], runner: Sequence[str] = ()) -> None:
    kernels, eager, exact = program()
    for k, (got, theirs, true) in enumerate(
        zip(kernels.run(folder, command, runner), eager, exact, strict=True)
    ):
        assert_matches(got, theirs, true, name=f"result {k}")


def command(compiler: str, *flags: str, without: Sequence[str] = ("-shared",)) -> list[str]:
    toolchain = find_toolchain(Config(cxx=compiler, cxx_flags=flags))
    return [toolchain.compiler, *(f for f in toolchain.flags if f not in without)]


@pytest.mark.parametrize("level", ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_levels_of_x86(level: str, tmp_path: Path) -> None:
    needed = {"x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}.get(level, "sse4_2")
    if needed not in FEATURES:
        pytest.skip(f"needs a processor with {needed}")
    check(tmp_path, command("g++", f"-march={level}"))


def test_clang(tmp_path: Path) -> None:
    if not shutil.which("clang++"):
        pytest.skip("needs clang++ (Debian: apt install clang libomp-dev)")
    check(tmp_path, command("clang++"))


def test_without_openmp(tmp_path: Path) -> None:
    check(tmp_path, command("g++", "-fno-openmp"))


def test_routines_compile_without_openmp(tmp_path: Path) -> None:
    for name, text in header_texts().items():
        (tmp_path / name).write_text(text)
    groups = [Group(name, "") for name in GROUPS]
    units = [unit_text(g.header, g.bodies(), {}) for g in groups]
    for number, unit in enumerate(units):
        (tmp_path / f"unit{number}.cpp").write_text(unit)
    files = [f"unit{number}.cpp" for number in range(len(units))]
    serial = command("g++", "-fno-openmp", "-fsyntax-only", "-w")
    done = subprocess.run([*serial, *files], cwd=tmp_path, capture_output=True, text=True)
    assert len(units) > 10 and not done.returncode, done.stderr[:2000]


def test_arm(tmp_path: Path) -> None:
    if not shutil.which(ARM) or not shutil.which(RUN_ARM[0]):
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user")
    check(tmp_path, arm_command(), RUN_ARM)


def arm_command(*flags: str) -> list[str]:
    native = ("-shared", "-march=native", "-DDICP_LIBMVEC=240", *NO_GATHER)
    return [*command(ARM, without=native), *flags]


PROCEDURE = """
extern "C" __attribute__((aarch64_vector_pcs)) float32x%(lanes)s_t
_ZGVnN%(lanes)sv_%(name)sf(float32x%(lanes)s_t x) {
  for (int k = 0; k < %(lanes)s; k++) x[k] = __builtin_%(name)sf(x[k]);
  return x;
}
"""
RELEASES = {238: 3, 239: 6, 240: 8}
"""How many of `functions` each release of ARM's glibc has."""


def functions(x: Tensor, count: int) -> list[Tensor]:
    """Sums of doubles take two values at a time."""
    y = x.abs() + 0.1
    return [
        y.log(), x.sin() + x.cos(), x.cos().double().sum(1), y.log1p() + x.expm1(),
        x.atan() + x.tan(), x.exp2() + y.log2(), x.sinh(), x.erfc(),
    ][:count]  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_vector_functions_of_arm(release: int, tmp_path: Path) -> None:
    """Kernels call the vector functions that ARM's glibc has, and no others."""
    if not shutil.which(ARM) or not shutil.which(RUN_ARM[0]):
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user")
    count, x = RELEASES[release], torch.randn(70, 65)
    kernels = Standalone(lambda x: functions(x, count), [x])
    build = arm_command(f"-DDICP_LIBMVEC={release}")
    with pytest.raises(subprocess.CalledProcessError):  # the linker asks for them
        kernels.run(tmp_path, build, RUN_ARM)
    names = ["log", "sin", "cos", "log1p", "expm1", "atan", "tan", "exp2", "log2", "sinh", "erfc"]
    lanes = (4,) if release == 238 else (2, 4)
    made = [PROCEDURE % {"name": name, "lanes": n} for name in names for n in lanes]
    (tmp_path / "libmvec.cpp").write_text("#include <arm_neon.h>\n" + "".join(made))
    results = kernels.run(tmp_path, [*build, "libmvec.cpp"], RUN_ARM)
    exact = functions(x.double(), count)
    for got, eager, true in zip(results, functions(x, count), exact, strict=True):
        assert_matches(got, eager, true)


@pytest.mark.parametrize("release", [238, 239])
def test_functions_that_a_release_lacks_are_not_called(release: int, tmp_path: Path) -> None:
    if not shutil.which(ARM) or not shutil.which(RUN_ARM[0]):
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user")
    start, x = RELEASES[release], torch.randn(70, 65)
    kernels = Standalone(lambda x: functions(x, 8)[start:], [x])
    results = kernels.run(tmp_path, arm_command(f"-DDICP_LIBMVEC={release}"), RUN_ARM)
    exact = functions(x.double(), 8)[start:]
    for got, eager, true in zip(results, functions(x, 8)[start:], exact, strict=True):
        assert_matches(got, eager, true)
