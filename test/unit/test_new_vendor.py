"""Packages that `new-vendor` writes: both families run, and what has no rule runs eagerly."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import COMPILER, Server
from typer.testing import CliRunner

from dicp.cli import app
from dicp.conformance.configuration import Configuration
from dicp.discovery import target_name
from dicp.dynamo_bridge.decompose import MUTATING
from dicp.errors import NewVendorError, TargetNotFoundError
from dicp.new_vendor import new_vendor
from dicp.target import find_target
from dicp.torch_private import OpOverload, all_decompositions
from dicp.vendor_report import PUBLIC, vendor_report

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"loopchip": "loop", "graphchip2": "graph"}

PROGRAM = r"""
import importlib
import re
import sys
import torch
import torch.nn.functional as F
from dataclasses import replace
from dicp import Backend
from dicp.dynamo_bridge.decompose import decompositions
from dicp.loop.lowering import RULES
from dicp.target import find_target

CASES = {
    "pointwise": (lambda x, y: (torch.relu(x) * y - 1).exp() / 3, 0),
    "reduction": (lambda x, y: (x + y).sum(-1) + x.amax(0).amax(), 0),
    "softmax": (lambda x, y: torch.softmax(x * y, -1), 0),
    "layer_norm": (lambda x, y: F.layer_norm(x, (8,)) * y, 1),
    "matmul": (lambda x, y: torch.relu(x @ y.t()), None),
    "pad": (lambda x, y: F.pad(x, (1, 2)).relu() + 1, None),
    "diagonal": (lambda x, y: torch.diagonal(x) * 2, None),
    "positions": (lambda x, y: x + torch.arange(x.shape[1]) + torch.linspace(0, 1, 8), None),
    "sort": (lambda x, y: torch.sort(x * 2)[0] + 1, 1),
}
STATIC_TOO = ("pointwise", "softmax", "matmul")  # the packages' own tests have static shapes
for name in sys.argv[1:]:
    for case, (fn, eager) in CASES.items():
        for dynamic in (False, True) if case in STATIC_TOO else (True,):
            torch.compiler.reset()
            backend = Backend(name)
            compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
            for rows in (8, 5) if dynamic else (8,):
                x = torch.rand(rows, 8)
                y = torch.rand(rows, 8)
                torch.testing.assert_close(compiled(x, y), fn(x, y))
            ran = [node.op for node in backend.reports[0].nodes if node.decision == "eager"]
            assert eager is None or len(ran) == eager, (name, case, ran)
            assert backend.reports[0].counts["compiled"], (name, case)
        x.requires_grad_()
        (got,) = torch.autograd.grad(compiled(x, y).sum(), x)
        (expected,) = torch.autograd.grad(fn(x, y).sum(), x)
        torch.testing.assert_close(got, expected)
        ops = [node.op for report in backend.reports for node in report.nodes]
        assert not [op for op in ops if op.startswith("prims.")], (name, case, ops)

def with_all_rules(name):
    # The loop vendor's code generator, given every kind of kernel.
    target = find_target(name)
    decompositions.cache_clear()
    type(target).rules = RULES
    type(target).facts = replace(target.facts, keep=RULES.ops())
    x, i = torch.randn(6, 40), torch.randint(0, 6, (9,))
    for fn in (
        lambda: x.cumsum(1) * 2,
        lambda: (x * 2).argmax(1),
        lambda: torch.zeros(6, 40).index_add(0, i, x[i]),
        lambda: (x.relu() * 3).sum(0),
        lambda: F.gelu(x).softmax(-1).bfloat16().sum(-1),
        lambda: torch.cat([F.embedding(i, x), x * 2], 0).flip(1),
    ):
        torch.compiler.reset()
        backend = Backend(name, cache=False)
        torch.testing.assert_close(torch.compile(fn, backend=backend)(), fn())
        assert not backend.reports[0].counts["eager"], backend.reports[0]

def colliding_stores(name):
    # Short types are combined in 32 bits, which hardware has atomics for, and the parallel loops
    # of a kernel whose stores may collide are not among those that a vendor divides.
    kernels = importlib.import_module(f"{name}_dicp.kernel").Kernel
    types = set()

    def backwards(self, body):
        return [re.sub(r"= 0; (\w+) < (.*); \+\+\w+\)", r"= \2; \1-- > 0;)", line)
                for line in self.loops(self.kernel.parallel, body, 1)]

    def combining(self, stmt, place, value):
        types.add(stmt.ref.dtype)
        return super(kernels, self).combining_store(stmt, place, value)

    kernels.parallel_loops, kernels.combining_store = backwards, combining
    i = torch.zeros(1000, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16, torch.int16, torch.int8, torch.bool):
        add = torch.compile(lambda z, s: z.index_add(0, i, s) if dtype != torch.bool
                            else z.index_put((i,), s, accumulate=True), backend=Backend(name))
        got = add(torch.zeros(2, dtype=dtype), torch.ones(1000, dtype=dtype))
        assert got.double().tolist() == [float(torch.tensor(1000).to(dtype)), 0], (dtype, got)
        top = torch.compile(lambda z, s: z.scatter_reduce(0, i, s, "amax"), backend=Backend(name))
        if dtype != torch.bool:
            got = top(torch.zeros(2, dtype=dtype), torch.arange(1000).to(dtype))
            assert got.double()[0] == torch.arange(1000).to(dtype).max().double(), (dtype, got)
    assert types == {torch.float32, torch.int32}, types
    x, numbers = torch.zeros(3), torch.arange(1000.)
    put = torch.compile(lambda x, y: x.index_put((i,), y), backend=Backend(name))
    assert put(x, numbers)[0] == 999, put(x, numbers)

with_all_rules(sys.argv[1])
colliding_stores(sys.argv[1])
print("all right")
"""


@dataclass(frozen=True)
class Installed:
    """A fresh virtual environment with both packages installed, and a folder to work in."""

    server: Server
    folder: Path

    def package(self, name: str) -> Path:
        """A package's folder, which has the name of what it holds."""
        return self.folder / f"{name}_dicp"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.server.run(["-W", "ignore", *arguments], **self.place("elsewhere"))

    def shell(self, commands: str) -> subprocess.CompletedProcess[str]:
        """A block of commands as a user types it, up to the first that fails."""
        offline = "python -m pip install -q --no-build-isolation --no-deps"
        commands = commands.replace("pip install", offline)
        commands = re.sub(
            r"^pytest", "python -m pytest -q -p no:cacheprovider", commands, flags=re.M
        )
        return subprocess.run(
            ["bash", "-e", "-c", commands], capture_output=True, text=True, check=False,
            **self.place("page"),
        )  # fmt: skip

    def place(self, folder: str) -> dict[str, Any]:
        """The folder that a program starts in, and its environment, where `python` is a command."""
        path = f"{self.folder}:{os.environ['PATH']}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
        return {"cwd": self.folder / folder, "env": env}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """What `pip install -e DIR` gives; torch and the tools come from this environment."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("elsewhere", "page"):
        (folder / name).mkdir()
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    own = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
    here = sysconfig.get_path("purelib")
    (Path(own) / "tools.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    for name, family in FAMILIES.items():
        new_vendor(name, family, folder / f"{name}_dicp")  # type: ignore[arg-type]
    server = Server(str(python), COMPILER, {**os.environ, "PYTHONPATH": str(ROOT)})
    server.write_command(folder / "python")
    found = Installed(server, folder)
    editable = [word for name in FAMILIES for word in ("-e", str(folder / f"{name}_dicp"))]
    made = found.run("-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", *editable)
    assert made.returncode == 0, made.stdout + made.stderr
    yield found
    server.close()


@pytest.mark.sweep
def test_both_families_run_pointwise_reductions_norms_and_products(installed: Installed) -> None:
    found = installed.run("-c", PROGRAM, *FAMILIES)
    assert found.stdout == "all right\n", found.stdout + found.stderr[-3000:]


def test_a_package_beside_its_folder_is_not_hidden_by_it(installed: Installed) -> None:
    program = "import loopchip_dicp, graphchip2_dicp; print(loopchip_dicp.LoopchipTarget.name)"
    found = installed.server.run(["-c", program], **installed.place("."))
    assert found.stdout == "loopchip\n", found.stderr


OUTSIDE = {
    "loopchip": ("dicp.testing.models.test_vision", "-k", "smoke or resnet18_inf", "false", 2),
    "graphchip2": ("dicp.testing.operators.test_matmul", "dicp.testing.operators.test_reduction",
                   "-k", "smoke or [mm- or [sum-", "both", 5),
}  # fmt: skip
"""Modules and names of dicp's tests for a package of each family, `--dynamic`, how many pass."""


@pytest.mark.parametrize("name", FAMILIES)
def test_an_installed_package_runs_dicp_s_tests_from_another_folder(
    name: str, installed: Installed
) -> None:
    """The backend by its registered name, the package's smoke test, dicp's operators and models."""
    *wanted, shapes, passed = OUTSIDE[name]
    smoke = str(installed.package(name) / "test" / f"test_{name}_dicp.py")
    found = installed.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", smoke, "--pyargs",
        *map(str, wanted), "--backend", f"{name}graph", "--device", "cpu", "--allow-eager",
        "--dynamic", str(shapes),
    )  # fmt: skip
    assert found.returncode == 0 and f"{passed} passed" in found.stdout, found.stdout[-3000:]


@pytest.mark.sweep
def test_packages_tests_are_collected_together(installed: Installed) -> None:
    """Their modules have different names: pytest imports both in one process."""
    folders = [str(installed.package(name) / "test") for name in FAMILIES]
    found = installed.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *folders
    )
    assert found.returncode == 0 and "2 passed" in found.stdout, found.stdout[-3000:]


@pytest.mark.sweep
def test_the_page_for_new_hardware_works(installed: Installed) -> None:
    """Its blocks of commands in order, in one folder: a package, rules, tests, a whole model."""
    page = (ROOT / "docs" / "new_hardware.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 8
    for block in blocks:
        found = installed.shell(block)
        assert found.returncode == 0, block + found.stdout[-3000:] + found.stderr[-2000:]


@pytest.mark.parametrize("family", ["loop", "graph"])
def test_packages_need_no_private_name(family: Any, tmp_path: Path) -> None:
    files = [file for file in new_vendor("outside", family, tmp_path) if file.suffix == ".py"]
    assert len(files) >= 6
    for file in files:
        text = file.read_text()
        assert "_private" not in text, file  # PyTorch's private names are dicp's to handle
        imported = re.findall(r"(?:from|import) (?:dicp|torch)[\w.]* import (.*)", text)
        assert not [line for line in imported if re.search(r"(?<!\w)_", line)], file
        used = re.findall(r"\b(?!self\b)\w+\._(?!_)\w+", text)
        assert not used, (file, used)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("cpu", "is taken; taken names are"),
        ("dicp", "is taken"),
        ("My-Chip", "is not a lower-case identifier"),
        ("chipgraph", "is not a lower-case identifier"),
        ("fresh", "is not empty"),
    ],
)
def test_a_package_that_cannot_be_written_is_refused(
    name: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "something").write_text("")
    with pytest.raises(NewVendorError, match=problem):
        new_vendor(name, "loop", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["something"]
    with pytest.raises(NewVendorError, match="'fresh' cannot be written to .*: Not a directory"):
        new_vendor("fresh", "loop", tmp_path / "something" / "inside")


def test_the_configuration_of_pytorch_s_tests_is_one_that_they_read(tmp_path: Path) -> None:
    (file,) = (f for f in new_vendor("outside", "loop", tmp_path) if f.name == "device_config.toml")
    file.write_text(re.sub(r"^# (?=\w+ = |\[)", "", file.read_text(), flags=re.M))
    found = Configuration.read(file)
    assert found.dtypes == ("float32", "int64") and found.samples == 4
    assert [skip.operator for skip in found.skips] == ["linalg.svd"]
    assert [(one.rtol, one.atol) for one in found.tolerances] == [(1e-4, 1e-5)]


def test_decompositions_that_write_are_known() -> None:
    """Where PyTorch's decomposition copies into a view, AOTAutograd rejects the graph."""
    import inspect

    found = set()
    for op, rule in all_decompositions.items():
        if isinstance(op, OpOverload) and not op._schema.is_mutable:
            try:
                text = inspect.getsource(inspect.unwrap(rule))
            except (OSError, TypeError):
                continue
            found |= {op} if re.search(r"\bcopy_to\(|\.copy_\(", text) else set()
    assert torch.ops.aten.constant_pad_nd.default in found
    assert found <= MUTATING


def test_vendor_report_counts_and_ranks(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(
        '{"tests": {"op/test_a.py::x": "passed", "op/test_a.py::y": "failed",'
        ' "test/model/test_llama.py::z": "passed", "test_vision.py::w": "failed"},'
        ' "eager": {"aten.sort.default": {"no rule": 2}, "aten.mm.default": {"no rule": 7}}}'
    )
    report = vendor_report(find_target("cpu"), [file])
    assert report.tests == {"passed": 1, "failed": 1} and report.models == {
        "passed": 1,
        "failed": 1,
    }
    assert report.failures == ["op/test_a.py::y", "test_vision.py::w"]
    assert [(step.op, step.times) for step in report.steps] == [
        ("aten.mm.default", 7), ("aten.sort.default", 2),
    ]  # fmt: skip
    assert sum(report.public.values()) == len(PUBLIC) == len(set(PUBLIC)) == 103
    assert report.public["compiled"] + report.public["library"] + report.public["view"] > 85
    assert "missing" not in report.public
    assert report.core["compiled"] > 100 and report.listed["no rule"] == 0
    shown = CliRunner().invoke(app, ["vendor-report", "cpugraph", "--results", str(file)])
    assert shown.exit_code == 0 and "failed: op/test_a.py::y" in shown.stdout
    file.write_text("[]")
    refused = CliRunner().invoke(app, ["vendor-report", "cpu", "--results", str(file)])
    assert "holds no results of tests" in str(refused.exception)


def test_a_backend_s_name_stands_for_its_target() -> None:
    assert target_name("cpugraph") == target_name("cpu") == "cpu"
    with pytest.raises(TargetNotFoundError):
        target_name("nochip")
