"""Bisection of a loss: operator, kernel, line and reproducer; agreement; what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from faults import KINDS, as_if, aten, planted
from support.forked import COMPILER, server

from dicp.op_tools import bisect
from dicp.op_tools.script_run import RunResult, RunSpec, ScriptRun
from dicp.report.tool_results import read_results

SCRIPT = """\
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16))
head = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)


@torch.compile
def forward(x):
    h = torch.sin(model(x)) * 2
    h = F.dropout(torch.erf(h), 0.1)  # erf
    return head(h)


for step in range(5):
    x = torch.randn(6, 8)
    y = torch.arange(6) % 4
    loss = F.cross_entropy(forward(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MODULE = """\
import torch

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x):
        return self.down(torch.cumsum(self.up(x), 1))  # cumsum


model = Model().bfloat16()
for step in range(3):
    value = model(torch.ones(4, 8).bfloat16()).float().square().mean()
    value.backward()
    print(f"step {step} {{'loss': {value.item():.6f}}}")
"""


def in_this_process(spec: RunSpec) -> RunResult:
    torch._dynamo.reset()
    return ScriptRun(spec).run()


def run(script: str, *arguments: str) -> int:
    Path("train.py").write_text(script)
    given = ["train.py", "--backend", "cpugraph", "--steps", "3", *arguments]
    return bisect.main(given, in_this_process)


def found(text: str) -> dict[str, str]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip(): row[1].strip() for row in rows}


def line_of(script: str, mark: str) -> int:
    return next(k for k, line in enumerate(script.splitlines(), 1) if line.endswith(f"# {mark}"))


def test_runs_that_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SCRIPT) == 0
    assert capsys.readouterr().out.endswith("bisect: loss agrees after 2 runs\n")


ANNOTATED = """\
import dataclasses

import torch


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


(setting,) = dataclasses.fields(Settings)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
for step in range(3):
    loss = setting.type("0.5") * torch.compile(model)(torch.ones(2, 4)).mean()
    loss.backward()
"""


def test_annotations_of_a_script_are_what_they_are_without_the_tool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(ANNOTATED) == 0, capsys.readouterr().err


def test_the_operator_is_found_with_kernel_line_and_reproducer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with planted({aten.erf.default: as_if(aten.tanh.default)}):
        assert run(SCRIPT) == 1
        text = capsys.readouterr().out
        rows = found(text)
        assert rows["operator"] == "aten.erf.default" and "erf" in rows["kernel"]
        assert rows["line"].endswith(f"train.py:{line_of(SCRIPT, 'erf')}")
        runs, operators = map(int, re.findall(r"\d+", rows["runs"]))
        assert operators > 10 and runs <= math.log2(operators) + 3
        (told,) = read_results(Path("op_tools_results")).bisections
        assert {name: told[name] for name in rows if name != "found"} == {
            name: value for name, value in rows.items() if name != "found"
        }
        assert float(rows["error"].split(",")[0]) > 1e-3 and float(rows["operator alone"]) > 1e-3
    assert text.count("\nrun ") + 1 == runs
    script = rows["reproducer"]
    done = server(*COMPILER).run([script], check=True)
    assert "True" in done.stdout, "without the fault the kernel is right"


def test_a_script_that_compiles_nothing_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    """The metric is printed by no variable of its name: it is what `backward` is called on."""
    assert run(MODULE) == 0
    capsys.readouterr()
    with planted({aten.cumsum.default: KINDS["strides"][aten.cumsum.default]}):
        assert run(MODULE) == 1
    rows = found(capsys.readouterr().out)
    assert rows["operator"] == "aten.cumsum.default"
    assert rows["line"].endswith(f"train.py:{line_of(MODULE, 'cumsum')}")


def test_a_printed_metric(capsys: pytest.CaptureFixture[str]) -> None:
    printed = MODULE.replace("value.backward()", "pass").replace("'loss'", "'score'")
    assert run(printed, "--metric", "score") == 0
    with planted({aten.cumsum.default: KINDS["strides"][aten.cumsum.default]}):
        assert run(printed, "--metric", "score") == 1
    assert found(capsys.readouterr().out)["operator"] == "aten.cumsum.default"


@pytest.mark.parametrize(
    ("source", "draw"),
    [
        ("Python's module random", "torch.full((6, 8), random.random())"),
        ("numpy.random", "torch.tensor(numpy.random.rand(6, 8)).float()"),
        (
            "none of the shared generators",
            "torch.randn(6, 8, generator=torch.Generator().manual_seed(time.time_ns() % 2**31))",
        ),
        ("PyTorch's generator", "(torch.seed(), torch.randn(6, 8))[1]"),
    ],
)
def test_what_is_not_reproducible(
    source: str, draw: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = "import random, time, numpy\n"
    assert run(imports + SCRIPT.replace("torch.randn(6, 8)", draw)) == 2
    assert f"not reproducible: the first call of the model gets other inputs or weights in a " \
           f"second run: {source}" in capsys.readouterr().out  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["train.py", "--steps", "0"], "--steps is 0; expected a number above 0"),
        (["train.py", "--steps", "many"], "invalid int value"),
        (["train.py", "--backend", "nothinggraph"], "nothing"),
        (["train.py", "--metric", "accuracy"], "the script shows no 'accuracy'"),
        (["fails.py"], "the script fails when it runs eager: ValueError: no data"),
        (["empty.py"], "the script compiles nothing"),
        ([], "SCRIPT"),
    ],
)
def test_usage_errors(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT)
    Path("fails.py").write_text("raise ValueError('no data')")
    Path("empty.py").write_text("loss = 1")
    try:
        status = bisect.main(["--backend", "cpugraph", *arguments], in_this_process)
    except SystemExit as end:
        status = end.code
    assert status == bisect.USAGE == 64
    assert says in capsys.readouterr().err


@pytest.mark.sweep
def test_the_command_line_runs_the_script_in_processes_of_its_own() -> None:
    Path("train.py").write_text(SCRIPT.replace("range(5)", "range(2)"))
    command = ["-m", "dicp.op_tools.bisect", "train.py", "--backend", "cpugraph"]
    done = server(*COMPILER).run(command, check=True)
    assert done.stdout.splitlines()[-1] == "bisect: loss agrees after 2 runs"


@pytest.mark.parametrize(
    ("script", "kind", "values"),
    [
        ("print('loss: 0.5')\nprint('loss: 0.25', end='')", "printed", [0.5, 0.25]),
        ("import sys\nfor i in (1, 2):\n    sys.stdout.write(f'\\rloss {i}.5 ')", "printed",
         [1.5, 2.5]),
        ("import sys\nsys.stdout.reconfigure(line_buffering=True)\n"
         "sys.stdout.buffer.write('\u00fc loss=3.0\\n'.encode())", "printed", [3.0]),
        ("import numpy\nfor i in (1, 2):\n    loss = numpy.float32(i)", "assigned", [1.0, 2.0]),
    ],
    ids=["no last newline", "progress bar", "bytes", "numpy"],
)  # fmt: skip
def test_ways_to_show_a_metric(script: str, kind: str, values: list[float]) -> None:
    Path("train.py").write_text(script)
    found = ScriptRun(RunSpec("train.py")).run()
    assert (found.error, found.values[kind]) == ("", values)
