"""Backends by name and as objects; their reports."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from dicp import Backend
from dicp.dynamo_bridge import backend as module
from dicp.dynamo_bridge import decompose
from dicp.dynamo_bridge.backend import target_for_devices
from dicp.errors import TargetNotFoundError


def fn(x: Tensor) -> Tensor:
    return (x * 2).sum(-1)


def test_entry_points_are_registered() -> None:
    assert {"cpugraph", "dicp"} <= set(torch._dynamo.list_backends())


@pytest.mark.parametrize("name", ["cpugraph", "dicp"])
def test_backends_by_name(name: str) -> None:
    x = torch.rand(3, 4)
    torch.testing.assert_close(torch.compile(fn, backend=name)(x), fn(x))


def test_names_are_made_from_targets() -> None:
    assert module.cpugraph is module.cpugraph
    with pytest.raises(AttributeError):
        _ = module.nothinggraph


def test_device_chooses_the_target() -> None:
    assert target_for_devices({"cpu"}).name == "cpu"
    assert target_for_devices(set()).name == "cpu"
    with pytest.raises(TargetNotFoundError, match="xpu"):
        target_for_devices({"xpu"})


@pytest.mark.parametrize("compiler", ["cpugraph", "topsgraph", Backend("cpu", fuse=False)])
def test_copies_of_a_compiled_module_share_its_backend(compiler: str | Backend) -> None:
    """A copy has no reports to copy, whose graphs hold tensors without memory."""
    compiled = torch.compile(torch.nn.Linear(4, 4), backend=compiler)
    x = torch.randn(2, 4)
    expected = compiled(x)
    torch.testing.assert_close(copy.deepcopy(compiled)(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(compiled))(x), expected)


def test_pickled_backends_keep_their_options() -> None:
    compiler = Backend("cpu", fuse=False)
    torch.compile(fn, backend=compiler)(torch.rand(3, 4))
    found = pickle.loads(pickle.dumps(compiler))
    assert (found.target_name, found.options, list(found.reports)) == ("cpu", {"fuse": False}, [])
    assert copy.deepcopy(compiler) is compiler
    assert pickle.loads(pickle.dumps(module.cpugraph)) is module.cpugraph


def test_unknown_target() -> None:
    with pytest.raises(Exception, match="no target named 'cpuu'.*Did you mean 'cpu'"):
        torch.compile(fn, backend=Backend("cpuu"))(torch.rand(3))


def test_reports_newest_last_and_levels_of_the_cache(tmp_path) -> None:  # type: ignore[no-untyped-def]
    levels = []
    for _ in range(2):
        compiler = Backend("cpu", cache_dir=tmp_path)
        torch._dynamo.reset()
        torch.compile(fn, backend=compiler)(torch.rand(3, 4))
        (report,) = compiler.reports
        levels.append(report.cache)
        assert report.kind == "inference"
        assert report.counts["compiled"] == 2
        assert report.kernels and report.nodes
    assert levels == ["cold", "aot"]


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_modes_are_accepted(mode: str) -> None:
    x = torch.rand(3, 4)
    torch.testing.assert_close(torch.compile(fn, backend="cpugraph", mode=mode)(x), fn(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_traces_are_decomposed_where_a_release_needs_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decompose, "TRACE_HAS_A_SYMBOLIC_DERIVATIVE", False)
    x = torch.arange(35).reshape(5, 7).to(dtype).requires_grad_(dtype == torch.float64)
    seen: list[torch.fx.GraphModule] = []

    def watched(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        run = Backend("cpu", cache=False)(gm, inputs)
        seen.append(gm)
        return run

    got = torch.compile(lambda x: torch.trace(x) + x.t().trace(), backend=watched, dynamic=True)(x)
    assert got.dtype == torch.trace(x).dtype and got == 2 * torch.trace(x)
    assert not any("trace" in str(node.target) for node in seen[0].graph.nodes)
    if x.requires_grad:
        got.backward()
        assert torch.equal(x.grad, 2 * torch.eye(5, 7, dtype=dtype))
