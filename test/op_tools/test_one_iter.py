"""Recordings of modules: what is saved, what is compared, what is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faults import as_if, aten, planted, with_args
from torch import nn

from dicp.errors import CaptureFormatError, RecordingMismatchError, ToolWarning
from dicp.op_tools import one_iter, storage
from dicp.op_tools.module_compare import compared
from dicp.report.tool_results import read_results


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)
        self.act, self.drop = nn.Tanh(), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.bn = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return {"logits": self.head(self.bn(x.transpose(1, 2)).transpose(1, 2))}


def made(
    dtype: torch.dtype = torch.float32, blocks: int = 2
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(blocks).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


IDS = torch.arange(12).reshape(2, 6) % 10


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = F.cross_entropy(model(IDS)["logits"].float().flatten(0, 1), IDS.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def recorded(
    folder: str = "a", dtype: torch.dtype = torch.float32, blocks: int = 2
) -> tuple[nn.Module, object]:
    model, optimizer = made(dtype, blocks)
    with one_iter.record(model, optimizer, folder):
        step(model, optimizer)
    return model, optimizer


def test_what_a_recording_holds() -> None:
    model, optimizer = made()
    before = copy.deepcopy(model.state_dict())
    with one_iter.record(model, optimizer, "a", iters=2):
        for _ in range(3):
            step(model, optimizer)
    index = json.loads(Path("a/recording.json").read_text())
    calls = [(c["iteration"], c["path"], c["random"]) for c in index["calls"]]
    block = [(f"blocks.{k}{p}", p in ("", ".drop"))
             for k in (0, 1) for p in ("", ".norm", ".up", ".act", ".drop")]  # fmt: skip
    order = [("", True), ("embed", False), *block, ("bn", False), ("head", False)]
    assert calls == [(i, *entry) for i in (0, 1) for entry in order]
    assert {p.suffix for p in Path("a").rglob("*") if p.is_file()} == {".json", ".safetensors"}
    folder = Path("a/iteration0/0005_blocks.0.act")
    values = {f: storage.load(folder / f) for f in (
        "input", "output", "grad_outputs", "grad_inputs")}  # fmt: skip
    x, y = values["input"].value["args"][0], values["output"].value
    assert torch.equal(torch.tanh(x), y)
    (g,), (dx,) = values["grad_outputs"].value, values["grad_inputs"].value
    torch.testing.assert_close(dx, g * (1 - y * y))
    assert storage.load(Path("a/iteration0/0002_blocks.0/input")).value["kwargs"] == {"scale": 0.5}
    assert len(values["input"].facts["random_state"]) > 5000
    assert storage.load(Path("a/iteration0/0001_embed/grad_outputs")).value[0] is not None
    weights = [storage.load(Path(f"a/iteration{i}/weights_{w}")).value
               for i in (0, 1) for w in ("before", "after")]  # fmt: skip
    for key, value in before.items():
        assert torch.equal(weights[0][key], value), key
        assert torch.equal(weights[1][key], weights[2][key])
    assert not torch.equal(weights[2]["head.weight"], weights[3]["head.weight"])


def test_the_recorded_step_is_unchanged() -> None:
    plain, optimizer = made()
    torch.manual_seed(5)
    step(plain, optimizer)
    model, optimizer = made()
    torch.manual_seed(5)
    with one_iter.record(model, optimizer, "a"):
        step(model, optimizer)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert not model.head._forward_hooks and not model.head._forward_pre_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chained", [False, True])
def test_a_backend_that_is_right_agrees(
    dtype: torch.dtype, chained: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = recorded(dtype=dtype, blocks=1)
    state = copy.deepcopy(model.state_dict())
    report = one_iter.compare("a", model, optimizer, backend="cpugraph", chained=chained)
    assert report.ok, [(r.call.name, c) for r in report.failures for c in r.comparisons]
    assert not [r.note for r in report.records if r.note]
    names = {(r.path, c.name) for r in report.records for c in r.comparisons}
    assert {("blocks.0.act", "output[0]"), ("", "output[0]")} <= names
    if not chained:
        assert {("blocks.0.up", "grad weight"), ("blocks.0.up", "grad_input[0]"),
                ("bn", "buffer running_mean"), ("optimizer", "weight head.weight"),
                ("blocks.0", "input[0]")} <= names  # fmt: skip
    assert all(map(torch.equal, model.state_dict().values(), state.values())), "left as it was"
    text = capsys.readouterr().out
    assert "one_iter: " in text and "0 calls wrong" in text and " blocks.0.act " in text


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


def test_gradients_that_are_zero_but_for_roundings_agree() -> None:
    """A bias of keys moves every score of a row alike: its gradient is zero."""
    torch.manual_seed(0)
    model = Attention()
    with one_iter.record(model, None, "a"):
        model(torch.randn(2, 1, 16, 32)).square().sum().backward()
    report = one_iter.compare("a", model, backend="cpugraph")
    assert report.ok, [(r.call.name, c) for r in report.failures for c in r.comparisons]
    large, small = torch.ones(4), torch.full((4,), 1e-4)
    eager = {"grad weight": large, "grad bias": small}
    wanted = {name: value.double() for name, value in eager.items()}
    _, bias = compared({"grad weight": large, "grad bias": small * 1.1}, wanted, eager)
    assert not bias.fp64


def test_modules_run_under_the_autocast_that_was_recorded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with one_iter.record(model, None, "a"), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 8)).float().square().sum().backward()
    for chained in (False, True):
        report = one_iter.compare("a", model, backend="cpugraph", chained=chained)
        assert report.ok, [(r.call.name, c) for r in report.failures for c in r.comparisons]
        assert not [r.note for r in report.records if r.note]
    with planted({aten.tanh.default: as_if(aten.sigmoid.default)}):
        report = one_iter.compare("a", model, backend="cpugraph")
    assert [r.path for r in report.innermost] == ["1"]


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.row = Sine(), Sine()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x[:, :5]).sum() + self.row(x[:1].expand(4, 6)).sum()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("path", "stride"), [("part", (6, 1)), ("row", (0, 1))])
def test_modules_get_the_strides_that_were_recorded(
    path: str, stride: tuple[int, ...], grad: bool
) -> None:
    model = Sliced()
    with one_iter.record(model, None, "a"):
        model(torch.randn(4, 6, requires_grad=grad))

    def wrong_on_stride(rule_of: Any, own: Any) -> Any:
        def rule(b: Any, *args: Any) -> Any:
            found = b.node.args[0].meta["val"].stride() == stride
            return (rule_of(aten.cos.default) if found else own)(b, *args)

        return rule

    with planted({aten.sin.default: wrong_on_stride}):
        report = one_iter.compare("a", model, backend="cpugraph")
    assert [r.path for r in report.innermost] == [path]


class Degenerate(nn.Module):
    """Results without dimensions, without elements, that are None, and that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.empty = nn.Linear(8, 8), nn.Linear(8, 0)
        self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y = self.up(x) * self.scale
        return y.sum(), self.empty(y), None, y[:0], (x * self.unused.sum()).cos()


@pytest.mark.parametrize("grad", [False, True])
def test_gradients_of_results_that_a_loss_reads_in_part(grad: bool) -> None:
    """Nodes and results that a backward does not reach are not waited for."""
    model = Degenerate()
    with one_iter.record(model, torch.optim.SGD(model.parameters(), 0.1), "a"):
        model(torch.randn(4, 8, requires_grad=grad))[0].backward()
    (given,) = [
        g for g in storage.load(Path("a/iteration0/0000_model/grad_outputs")).value if g is not None
    ]
    assert given.item() == 1
    report = one_iter.compare("a", model, backend="cpugraph")
    names = {(r.path, c.name) for r in report.records for c in r.comparisons}
    wanted = {("", "grad up.weight"), ("", "grad scale"), ("up", "grad bias")}
    assert names >= wanted | ({("", "grad_input[0]")} if grad else set())
    assert report.ok, [(r.call.name, c) for r in report.failures for c in r.comparisons]


@pytest.mark.parametrize("chained", [False, True])
def test_a_wrong_rule_is_named(chained: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = recorded()
    with planted({aten.tanh.default: as_if(aten.sigmoid.default)}):
        report = one_iter.compare("a", model, optimizer, backend="cpugraph", chained=chained)
    assert report.first is not None and report.first.path == "blocks.0.act"
    text = capsys.readouterr().out
    assert "first: blocks.0.act (Tanh): output[0]" in text
    if not chained:
        assert {r.path for r in report.innermost} == {"blocks.0.act", "blocks.1.act"}
        (inside,) = report.inside["blocks.0.act"]
        assert inside.operator == "aten.tanh.default"
        assert "in blocks.0.act: operator aten.tanh.default" in text
        told = read_results(Path("op_tools_results"))
        assert told.module_values > len(told.modules) > 0
        assert {row["module"] for row in told.modules} >= {"blocks.0.act", "blocks.1.act"}
        assert "operator aten.tanh.default" in {row["tensor"] for row in told.modules}
    else:
        assert "blocks.0.drop" in {r.path for r in report.failures}, "its inputs are wrong too"


def test_compiled_models_are_judged_as_a_whole() -> None:
    for make in (lambda m: torch.compile(m, backend="cpugraph"), lambda m: m):
        model, optimizer = made()
        whole = make(model)
        if whole is model:
            model.blocks[0].compile(backend="cpugraph")
        folder = "whole" if whole is not model else "part"
        with one_iter.record(whole, optimizer, folder):
            step(whole, optimizer)
        paths = [
            c["path"] for c in json.loads(Path(f"{folder}/recording.json").read_text())["calls"]
        ]
        if whole is not model:
            assert paths == [""]
        else:
            assert "blocks.0" in paths and "blocks.0.up" not in paths and "blocks.1.up" in paths
    model, optimizer = recorded()
    model.eval()
    compiled = torch.compile(model, backend="cpugraph", options={"fallback_random": True})
    assert one_iter.compare("a", compiled, optimizer).ok
    with planted({aten.tanh_backward.default: with_args(lambda g, y: (g, g))}):
        report = one_iter.compare("a", compiled, optimizer)
    assert [r.path for r in report.failures] == [""]
    assert {r.operator for r in report.inside[""]} == {"aten.tanh_backward.default"}


def test_a_device_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = recorded()
    assert one_iter.compare("a", model, optimizer, device="cpu").ok


def test_two_recordings_differ(capsys: pytest.CaptureFixture[str]) -> None:
    recorded("a")
    recorded("b")
    assert one_iter.main(["diff", "a", "b"]) == 0
    assert "0 differ" in capsys.readouterr().out
    model, optimizer = made()
    model.blocks[1].act = nn.ReLU()
    with one_iter.record(model, optimizer, "c"):
        step(model, optimizer)
    assert one_iter.main(["diff", "a", "c"]) == 1
    text = capsys.readouterr().out
    assert "first: (model) output logits" in text
    wrong = [line.split("|")[1].strip() for line in text.splitlines() if "| False" in line
             or "|  False" in line]  # fmt: skip
    assert not [w for w in wrong if w.startswith("blocks.0 ") and "grad" not in w]
    assert "blocks.1.act output[0]" in wrong and "blocks.1.act input[0]" not in wrong
    assert one_iter.main(["diff", "a", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_recordings_that_cannot_be_written_or_read() -> None:
    model, optimizer = made()
    Path("file").write_text("no folder")
    with pytest.warns(ToolWarning) as caught, one_iter.record(model, optimizer, "file"):
        step(model, optimizer)
    assert len(caught) == 1 and "one_iter stops recording" in str(caught[0].message)
    with pytest.raises(CaptureFormatError, match=r"recording\.json.*one_iter\.record\."):
        one_iter.compare("nothing", model)
    recorded()
    next(Path("a").rglob("weights_before.safetensors")).write_bytes(b"12")
    with pytest.raises(CaptureFormatError, match=r"weights_before.*one_iter\.record\."):
        one_iter.compare("a", *made())


def test_a_recording_replaces_one_in_its_folder() -> None:
    recorded()
    Path("a/notes").write_text("the user's")
    with one_iter.record(nn.Tanh(), None, "a"):
        pass
    left = {p.name for p in Path("a").rglob("*") if p.is_file()}
    assert left == {"notes", "recording.json", "weights_before.json", "weights_before.safetensors"}


class Summed(Model):
    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": super().forward(ids)["logits"].sum()}


class Silent(Model):
    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": super().forward(ids)["logits"].detach()[:1]}


def wider() -> nn.Module:
    model = Model()
    model.head = nn.Linear(8, 12)
    return model


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sizes": (
        wider,
        "head.weight: torch.float32 (10, 8) in the recording, torch.float32 (12, 8) in the model",
    ),
    "names": (
        lambda: nn.Sequential(Model()),
        "0.embed.weight: missing in the recording, torch.float32 (10, 8) in the model",
    ),
    "dtypes": (
        lambda: Model().double(),
        "head.bias: torch.float32 (10,) in the recording, torch.float64 (10,) in the model",
    ),
    "gradients": (
        Summed, "(model) (Summed) cannot be run on its recorded inputs and gradients: Run"
    ),
    "results": (
        Silent, "(model) (Silent): output[0]: (2, 6, 10) in the recording, (1, 6, 10) in the model"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "chained"), [*((n, False) for n in OTHERS), ("names", True),
                                               ("gradients", True), ("results", True)])  # fmt: skip
def test_a_model_that_was_not_recorded(name: str, chained: bool) -> None:
    recorded()
    make, problem = OTHERS[name]
    with pytest.raises(RecordingMismatchError, match="'a' is of another model or") as raised:
        one_iter.compare("a", make(), chained=chained)
    assert any(line.startswith(problem) for line in raised.value.differences)


def test_an_optimizer_that_was_not_recorded() -> None:
    model, _ = recorded()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RecordingMismatchError) as raised:
        one_iter.compare("a", model, sgd)
    assert raised.value.differences == (
        "a step of SGD from the recorded state raises KeyError: 'momentum'",
    )


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.detach())


def test_gradients_of_modules_that_pass_none_to_their_inputs() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Detached())
    with one_iter.record(model, None, "a"):
        model(torch.ones(2, 3)).sum().backward()
    report = one_iter.compare("a", model)
    found = {(r.path, c.name) for r in report.records for c in r.comparisons}
    assert {("1", "grad head.weight"), ("1.head", "grad weight")} <= found and report.ok


class Mode(nn.Module):
    def __init__(self, seen: list[bool]) -> None:
        super().__init__()
        self.seen = seen

    def __deepcopy__(self, memo: object) -> nn.Module:
        return Mode(self.seen).train(self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.training)
        return x * 1


def test_modules_run_in_the_modes_of_the_program() -> None:
    """A layer that is frozen inside a model that trains stays in evaluation."""
    seen: list[bool] = []
    model = nn.Sequential(nn.Linear(3, 3), Mode(seen))
    model[1].eval()
    with one_iter.record(model, None, "a"):
        model(torch.ones(2, 3)).sum().backward()
    model.train()
    assert one_iter.compare("a", model).ok and one_iter.compare("a", model, chained=True).ok
    assert len(seen) > 5 and not any(seen)
