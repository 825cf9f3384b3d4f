"""Capture: files and their content, gradients, budgets, failures, replay."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dicp import op_tools
from dicp.errors import CaptureFormatError, ToolWarning
from dicp.op_tools import storage
from dicp.op_tools.run_op_from_data import find_captures, main, read_capture

ROOT = Path("op_tools_results/op_capture_results")


def captured(folder: Path, file: str) -> object:
    return storage.load(folder / file).value


def test_every_value_comes_back_as_it_was(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    values = {
        "view": base[1:3, ::2], "other": base.t(), "expanded": torch.ones(1).expand(3),
        "half": torch.randn(3).half().requires_grad_(), "bool": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64), "conj": torch.randn(2).cfloat().conj(),
        "negative": torch.randn(2, dtype=torch.complex64).conj().imag,
        "empty": torch.empty(0, 3), "scalar": torch.tensor(3), "float8": torch.ones(2).to(
            torch.float8_e4m3fn),
        "plain": [1, 2.5, float("inf"), "a", None, True, torch.float16, torch.Size([2]), 1 + 2j,
                  slice(1, None, 2), ..., (1, [2, {"k": base}]), torch.device("cpu")],
    }  # fmt: skip
    storage.save(tmp_path / "x", values, {"operator": "o"})
    back = storage.load(tmp_path / "x").value
    for name, tensor in values.items():
        if isinstance(tensor, torch.Tensor):
            got = back[name]
            assert (got.dtype, got.stride(), got.requires_grad) == (
                tensor.dtype, tensor.stride(), tensor.requires_grad), name  # fmt: skip
            assert torch.equal(got.float() if name == "float8" else got,
                               tensor.float() if name == "float8" else tensor), name  # fmt: skip
    assert repr(back["plain"]) == repr(values["plain"])
    shared = {back[n].untyped_storage().data_ptr() for n in ("view", "other")}
    assert len(shared) == 1 and back["plain"][11][1][1]["k"].untyped_storage().data_ptr() in shared
    small = base[0, :2]
    storage.save(tmp_path / "small", small, {})
    assert load_file(tmp_path / "small.safetensors")["storage0"].numel() == 2, "cut to what is used"


def test_views_of_one_memory_in_several_dtypes_come_back(tmp_path: Path) -> None:
    """The part of the storage that they use together is no multiple of the widest."""
    x = torch.arange(6, dtype=torch.float32)
    views = [x.view(torch.int16)[:11], x.view(torch.float64)[:2], x.view(torch.uint8)[3:5]]
    storage.save(tmp_path / "x", views, {})
    back = storage.load(tmp_path / "x").value
    assert all(map(torch.equal, back, views))


def test_what_is_read_is_aligned_as_memory_of_the_program(tmp_path: Path) -> None:
    """Vector instructions on complex numbers crash otherwise."""
    for count in range(8):
        facts = {"operator": "o" * count}
        values = [torch.ones(3), torch.ones(2, dtype=torch.complex128), torch.ones(5).bool()]
        storage.save(tmp_path / "x", values, facts)
        for tensor in storage.load(tmp_path / "x").value:
            assert tensor.untyped_storage().data_ptr() % 64 == 0


def test_files_of_a_call_and_its_backward(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.randn(3, 4, requires_grad=True)
    with op_tools.OpCapture(["torch.mul"]):
        z = torch.mul(x, y) + x
        z.backward(torch.full((3, 4), 2.0))
    (folder,) = find_captures(ROOT)
    assert folder.relative_to(ROOT).parts[0] == "torch.mul"
    assert folder.parts[-2].isdigit() and len(folder.parts[-1].split("-")) == 6
    assert {p.name for p in folder.iterdir()} == {
        f"{n}.{s}"
        for n in ("input", "output", "grad_inputs", "grad_outputs")
        for s in ("safetensors", "json")
    }
    grads = captured(folder, "grad_inputs")
    assert torch.equal(grads[0], 2 * y) and torch.equal(grads[1], 2 * x), "of this call alone"
    facts = json.loads((folder / "input.json").read_text())
    assert facts["operator"] == "torch.mul" and "test_capture.py" in facts["source"]
    assert facts["torch"] == torch.__version__
    text = capsys.readouterr().out
    assert f"{folder}/input saved" in text and f"{folder}/grad_inputs saved" in text
    number = folder.parts[-2]
    assert text.count(f"forward_id:{number}/") == 2, "backward has its forward's id"
    assert "torch.mul grad_inputs[1]" in text and "torch.mul grad_output " in text


def test_gradients_without_memory_do_not_end_the_capture() -> None:
    """The gradient of sgn is a zero that autograd keeps without memory."""
    x = torch.randn(3, requires_grad=True)
    with op_tools.OpCapture(["torch.sgn", "torch.sin"]) as tool, op_tools.OpOverflowCheck():
        torch.sgn(torch.sin(x)).sum().backward()
    assert len(tool.saved) == 8
    (folder,) = find_captures(ROOT / "torch.sgn")
    assert captured(folder, "grad_inputs")[0].tolist() == [0, 0, 0]


def test_in_place_inputs_are_saved_as_they_were() -> None:
    x = torch.zeros(3)
    with op_tools.OpCapture(quiet=True):
        x.add_(1)
    (folder,) = find_captures(ROOT)
    assert captured(folder, "input")["args"][0].tolist() == [0, 0, 0]
    assert captured(folder, "output").tolist() == [1, 1, 1]


def test_tensors_given_by_keyword_are_captured() -> None:
    with op_tools.OpCapture(["torch.nn.functional.linear"], quiet=True):
        F.linear(input=torch.ones(2, 3), weight=torch.ones(4, 3), bias=torch.ones(4))
    (folder,) = find_captures(ROOT)
    kwargs = captured(folder, "input")["kwargs"]
    assert {k: tuple(v.shape) for k, v in kwargs.items()} == {
        "input": (2, 3), "weight": (4, 3), "bias": (4,)}  # fmt: skip


def test_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(8)

    def files(**budget: int) -> int:
        tool = op_tools.OpCapture(["torch.add", "torch.sub"], quiet=True, **budget)
        with tool:
            for _ in range(6):
                torch.add(x, 1)
                torch.sub(x, 1)
        return sum(path.name == "input" for path in tool.saved)

    assert files(first=2) == 4, "per operator"
    assert files(every=3) == 4
    assert files(every=2, first=1) == 2
    assert files(max_bytes=70) == 1


def test_no_pickle_is_written() -> None:
    with op_tools.OpCapture(quiet=True):
        torch.add(torch.ones(2), 1)
    assert {p.suffix for p in ROOT.rglob("*") if p.is_file()} == {".safetensors", ".json"}


def test_a_folder_that_cannot_be_written_ends_the_capture_with_one_warning() -> None:
    Path("file").write_text("no folder")
    with pytest.warns(ToolWarning) as caught, op_tools.OpCapture(folder="file", quiet=True):
        for _ in range(3):
            assert torch.add(torch.ones(2), 1).tolist() == [2, 2]
    (warning,) = caught
    assert "op_capture stops, the program goes on: file/" in str(warning.message)


def run(*arguments: str) -> int:
    return main([*arguments, "--run_times", "2"])


def test_replay_checks_and_measures(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with op_tools.OpCapture(quiet=True):
        torch.sort(x, descending=True)[0].sum().backward()
        x.detach().clone().relu_()
        torch.dropout(x, 0.5, True)
    capsys.readouterr()
    assert run(str(ROOT), "--acc_check") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"ditorch.framework: torch:{torch.__version__}")
    assert "torch.sort grad[0]" in text and "torch.Tensor.relu_ input" in text
    assert run(str(ROOT / "torch.sort"), "--acc_check") == 0
    hooked = set(re.findall(r"Hook on (\S+)", capsys.readouterr().out))
    assert hooked == {"torch.sort"}, "copies of the inputs are the replay's own"
    assert run(str(ROOT / "torch.sort"), "--sync_time_measure") == 0
    text = capsys.readouterr().out
    assert "forward_elasped" in text and "backward_elasped" in text
    assert run(str(ROOT / "torch.sort"), "--sync_time_measure", "--only_run_forward") == 0
    assert "| backward_elasped" not in capsys.readouterr().out.split("operator")[0].split(
        "op elasped")[0].replace("forward_elasped | backward_elasped", "")  # fmt: skip


@pytest.mark.parametrize("operator", [F.dropout, F.gumbel_softmax])
def test_a_random_operator_draws_what_it_drew(operator: Any) -> None:
    x = torch.randn(64)
    torch.rand(7)
    with op_tools.OpCapture([f"torch.nn.functional.{operator.__name__}"], quiet=True):
        want = operator(x)
    (folder,) = find_captures(ROOT)
    capture = read_capture(folder)
    assert capture.random_states is not None
    capture.random_states.restore()
    assert torch.equal(capture.function()(*capture.args, **capture.kwargs), want)
    for file in ("input", "output"):
        facts = storage.facts_of(folder / file)
        assert capture.random_states.as_facts().items() <= facts.items()


def test_replay_through_a_backend(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with op_tools.OpCapture(["torch.Tensor.softmax"], quiet=True):
        x.softmax(-1).sum().backward()
    assert run(str(ROOT), "--acc_check", "--backend", "cpugraph") == 0

    def wrong(gm: torch.fx.GraphModule, inputs: object) -> object:
        return lambda *args: tuple(value + 1 for value in gm.forward(*args))

    torch._dynamo.register_backend(wrong, name="off_by_one")
    capsys.readouterr()
    assert run(str(ROOT), "--acc_check", "--backend", "off_by_one") == 1
    assert "2 failures" in capsys.readouterr().out


def test_verdicts_of_a_compiled_operator_beside_eager(capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU too, eager is another run than that of the backend."""
    x = torch.randn(3, requires_grad=True)
    with op_tools.OpCapture(["torch.sin"], quiet=True):
        torch.sin(x).sum().backward()

    def wrong(gm: torch.fx.GraphModule, inputs: object) -> object:
        return lambda *args: tuple(value * 2 for value in gm.forward(*args))

    torch._dynamo.register_backend(wrong, name="doubled")
    options = ["--acc_check", "--run_times", "1"]
    for backend, verdict in (("eager", True), ("doubled", False)):
        capsys.readouterr()
        assert main([str(ROOT), *options, "--backend", backend]) == (0 if verdict else 1)
        text = capsys.readouterr().out
        assert text.count(f"verdicts: tolerance {verdict}, fp64 {verdict}") == 2


def test_overloads_are_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpCapture(quiet=True), op_tools.OpAutoCompare(quiet=True) as tool:
        torch.ops.aten.add_.Tensor(torch.ones(2), 1)
        torch.ops.aten.sin.default(torch.ones(2))
    (first, _) = (r for r in tool.results if r.operator.startswith("aten."))
    assert first.operator == "aten.add_.Tensor"
    assert "aten.add_.Tensor input(before)[0]" in {c.name for c in first.comparisons}
    assert run(str(ROOT), "--acc_check") == 0
    out = capsys.readouterr().out
    assert "aten.add_.Tensor output" in out and "aten.sin.default output" in out
    x = torch.ones(4).bfloat16()
    with op_tools.OpDtypeCast(quiet=True):
        torch.ops.aten.view.default(x, [2, 2]).zero_()
    assert x.tolist() == [0] * 4


def test_replay_fails_where_the_operator_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpCapture(["torch.Tensor.sin"], quiet=True):
        torch.randn(3).sin()
    library = torch.library.Library("aten", "IMPL")

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x) if x.dtype == torch.float32 else torch.cos(x - torch.pi / 2)

    library.impl("sin", wrong, "CPU", allow_override=True)
    try:
        assert run(str(ROOT), "--acc_check") == 1
    finally:
        library._destroy()
    assert "first failure: torch.Tensor.sin" in capsys.readouterr().out


def test_replays_have_the_strides_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 6)
    with op_tools.OpCapture(["torch.sin"], quiet=True):
        torch.sin(x[:, :5])
        torch.sin(x[:1].expand(4, 6))
    library = torch.library.Library("aten", "IMPL")
    seen: list[tuple[int, ...]] = []

    def sin(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            seen.append(x.stride())
        return torch.cos(x - torch.pi / 2)

    library.impl("sin", sin, "CPU", allow_override=True)
    try:
        assert run(str(ROOT), "--acc_check", "--run_times", "1") == 0
    finally:
        library._destroy()
    assert list(dict.fromkeys(seen)) == [(6, 1), (0, 1)]


def test_replays_run_under_the_autocast_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    """The second layer's input is bfloat16, its weights are not."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    with op_tools.OpCapture(["torch.nn.functional.linear"], quiet=True):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 8)).float().sum().backward()
    capsys.readouterr()
    for arguments in ([], ["--backend", "cpugraph"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AUTOCOMPARE_ERROR_TOLERANCE", "0.1,0.1")
            assert run(str(ROOT), "--acc_check", "--run_times", "1", *arguments) == 0
        rows = [x for x in capsys.readouterr().out.splitlines() if "linear output " in x]
        assert rows and all("torch.bfloat16 torch.float64" in row for row in rows)


def test_replays_in_place_have_the_strides_of_the_call() -> None:
    """A slice that wants a gradient is written as a slice."""
    x = torch.randn(4, 6, requires_grad=True)
    with op_tools.OpCapture(["torch.Tensor.sin_"], quiet=True):
        (x * 1)[:, :5].sin_()
    library = torch.library.Library("aten", "IMPL")
    seen: set[tuple[int, ...]] = set()

    def sin_(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            seen.add(x.stride())
        return x.copy_(torch.cos(x - torch.pi / 2))

    library.impl("sin_", sin_, "CPU", allow_override=True)
    try:
        assert run(str(ROOT), "--acc_check", "--run_times", "1") == 0
    finally:
        library._destroy()
    assert seen == {(6, 1)}


def test_replay_without_a_capture(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("nowhere") == 2
    assert "no capture found in nowhere" in capsys.readouterr().err


def test_older_layouts_and_foreign_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for parts in (
        ("op_capture_result", "0", "2024-06-20--08-41-27", "torch.Tensor.mul", "8"),
        ("op_capture_result", "torch.Tensor.mul", "93", "5"),
    ):
        folder = tmp_path.joinpath(*parts)
        folder.mkdir(parents=True)
        torch.save((torch.ones(3), torch.ones(3)), folder / "input.pth")
        assert read_capture(folder).operator == "torch.Tensor.mul"
    assert run(str(tmp_path / "op_capture_result"), "--acc_check") == 0
    torch.save({"args": (Foreign(),)}, folder / "input.pth")
    with pytest.raises(CaptureFormatError, match="weights_only=True"):
        read_capture(folder)
    assert run(str(folder)) == 2
    said = capsys.readouterr().err
    assert "weights_only=True" in said and said.count("eights only") == 1 and "\x1b" not in said


def test_views_of_other_memory_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    """as_strided reads the storage beyond its input."""
    x = torch.arange(24.0).reshape(4, 6)
    with op_tools.OpCapture(["torch.as_strided"], quiet=True):
        torch.as_strided(x[1], (3, 4), (6, 1))
    (folder,) = find_captures(ROOT)
    facts = json.loads((folder / "input.json").read_text())
    assert facts["tensors"][0]["storage_offset"] == 6
    assert run(str(ROOT), "--acc_check") == 0
    assert capsys.readouterr().out.count("forward_id:") == 2, "as often as --run_times says"


def test_every_capture_below_a_folder_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One that raises fails, one that cannot be read is named, and the others run."""
    x = torch.ones(2, 3)
    with op_tools.OpCapture(["torch.abs", "torch.cos", "torch.sin"], quiet=True):
        torch.sin(torch.cos(torch.abs(x)))
    first, second = (next(iter(find_captures(ROOT / f"torch.{n}"))) for n in ("abs", "cos"))
    text = (first / "input.json").read_text()
    capsys.readouterr()
    (first / "input.json").write_text(text.replace('"dict": []', '"dict": [["other", 3]]'))
    assert run(str(ROOT), "--acc_check") == 1
    out = capsys.readouterr().out
    assert out.startswith(f"ditorch.framework: torch:{torch.__version__}    device: cpu\n")
    assert "torch.abs raises TypeError" in out and "torch.sin output" in out
    (first / "input.json").write_text(text)
    (second / "input.json").write_text("{")
    assert run(str(ROOT), "--acc_check") == 2
    said = capsys.readouterr()
    assert "torch.cos" in said.err and "torch.sin output" in said.out


def test_a_capture_calls_operators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is data, perhaps of others: no other function that it names is run, nor its module."""
    (tmp_path / "outside.py").write_text("print('imported')\n\ndef double(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with op_tools.OpCapture(["torch.abs"], quiet=True):
        torch.abs(torch.ones(2))
    (folder,) = find_captures(ROOT)
    text = (folder / "input.json").read_text()
    outside = "os.system torch.os.system torch.hub.load torch.load torch.serialization.load "
    for name in (outside + "load_library.__call__ outside.double").split():
        (folder / "input.json").write_text(text.replace('"torch.abs"', f'"{name}"'))
        assert run(str(folder)) == 2
        said = capsys.readouterr()
        assert f"{name!r} is no operator of PyTorch's; --module MODULE" in said.err
        assert "imported" not in said.out
    assert run(str(folder), "--module", "outside", "--acc_check") == 0
    assert "imported" in capsys.readouterr().out
    assert run(str(folder), "--module", "outside", "--as_case", str(tmp_path / "no" / "x")) == 2
    assert "x is not saved: No such file or directory" in capsys.readouterr().err
    (folder / "input.json").write_text(text.replace('"format": 1', '"format": 2'))
    assert run(str(folder)) == 2 and "its format is 2, not 1" in capsys.readouterr().err


class Foreign:
    """A class that only a pickle can name."""


def test_damaged_captures_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpCapture(quiet=True):
        torch.add(torch.ones(2), 1)
    folder = next(iter(find_captures(ROOT / "torch.add")))
    (folder / "input.safetensors").write_bytes(b"12")
    assert run(str(folder)) == 2
    assert f"capture '{folder}/input' cannot be read" in capsys.readouterr().err


def test_files_that_are_no_captures_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage.save(tmp_path / "1" / "input", {"args": ()}, {"operator": "torch.add"})
    storage.save(tmp_path / "2" / "input", {"args": (), "kwargs": {}}, {})
    storage.save(tmp_path / "3" / "input", [1], {"operator": "torch.add"})
    storage.save(tmp_path / "4" / "input", {"args": (), "kwargs": {}}, {"operator": 5})
    for number, text in ((5, "3"), (6, '{"format": 1, "tensors": [{"dtype": "x"}]}')):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "input.json").write_text(text)
    assert run(str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert all(f"capture '{tmp_path / n}' cannot be read: " in said for n in "1234")
    assert all(f"capture '{tmp_path / n}/input' cannot be read: " in said for n in "56")


UNIT = "uniform(0, 1)"


def test_captures_become_cases() -> None:
    with op_tools.OpCapture(["torch.cat", "torch.add"], quiet=True):
        for _ in range(2):
            torch.add(torch.ones(3, 4).t(), 2, alpha=3)
        torch.cat([torch.ones(2), torch.ones(3)], dim=0)
    assert run(str(ROOT), "--as_case", "cases.toml") == 0
    added, joined = tomllib.loads(Path("cases.toml").read_text())["case"]
    assert [added["call"], joined["call"]] == ["torch.add", "torch.cat"], "each once"
    assert added["tensors"] == {"0": {"shape": [[4, 3]], "strides": [[1, 4]], "gen": UNIT}}
    assert added["parameters"] == {"1": [2], "alpha": [3]}
    assert joined["tensors"]["0"] == {"stack": True, "shape": [[[2], [3]]], "gen": UNIT}
    assert joined["parameters"] == {"dim": [0]}


def test_a_capture_that_is_no_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpCapture(["torch.cat", "torch.add"], quiet=True):
        torch.cat([torch.ones(2), torch.ones(2, dtype=torch.int64)])
        torch.add(torch.ones(2), 1)
    assert run(str(ROOT), "--as_case", "cases.toml") == 2
    assert "torch.cat" in (said := capsys.readouterr().err)
    assert "a case file has no form for a list of tensors of several dtypes" in said
    assert [c["call"] for c in tomllib.loads(Path("cases.toml").read_text())["case"]] == [
        "torch.add"
    ]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "gpu9", "Invalid device string: 'gpu9'"),
        ("--backend", "foograph", "Invalid backend: 'foograph'"),
        ("--run_times", "0", "'0' is not a whole number above 0"),
    ],
)
def test_a_wrong_option_of_a_replay_is_no_fault_of_the_capture(
    option: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with op_tools.OpCapture("torch.add", folder=tmp_path, quiet=True):
        torch.add(torch.ones(2), 1)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), option, value])
    assert ended.value.code == 2 and message in capsys.readouterr().err
