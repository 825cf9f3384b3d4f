"""Units of the CPU target: routines expected from Dynamo's graph, begun before lowering."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import gone
from torch import Tensor, fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.errors import CompilerError
from dicp.toolchain import find_compiler
from dicp.torch_private import ATTENTION_FORWARD
from dicp.vendor.cpu import target as target_module
from dicp.vendor.cpu import units as units_module
from dicp.vendor.cpu.calibration import Verdict
from dicp.vendor.cpu.routines import Group, choice, expected_groups, product
from dicp.vendor.cpu.thresholds import WIDE_CONVOLUTIONS
from dicp.vendor.cpu.units import Begun, Units

aten = torch.ops.aten
FACTS = replace(target_module.CpuTarget.facts, in_float32={})
PRODUCT, ATTENTION = Group("product", ""), Group("attention", "")


def graph_of(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(*args)
    return found[0]


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def decomposed(x: Tensor) -> Tensor:
    weights = F.softmax((x @ x.mT).float(), dim=-1).type_as(x)
    return torch.matmul(F.dropout(weights, 0.0), x)


@pytest.mark.parametrize(
    ("function", "shapes", "inference", "more_in_training"),
    [
        (F.linear, ((4, 8), (6, 8)), ["dots"], ["product"]),
        (F.linear, ((100, 8), (6, 8)), ["product"], []),
        (F.linear, ((32, 8), (48, 8)), ["product_transposed"], ["product"]),
        (F.linear, ((1, 8), (6, 8)), ["dots"], ["product", "axpys"]),
        (torch.addmm, ((6,), (1, 8), (8, 6)), ["axpys"], ["product", "dots"]),
        (torch.addmm, ((6,), (4, 8), (8, 6)), ["product"], ["dots"]),
        (torch.matmul, ((8,), (8,)), [], []),
        (torch.matmul, ((4, 8), (8, 6)), ["product"], ["dots"]),
        (lambda x, y: x @ y, ((4, 8), (8, 6)), ["product"], ["dots"]),
        (lambda x, y: x.mm(y), ((4, 8), (8, 6)), ["product"], ["dots"]),
        (F.conv2d, ((1, 2, 8, 8), (3, 2, 3, 3)), ["convolution"], ["convolution_filters"]),
        (attend, ((1, 2, 8, 4),), ["attention"], ["attention_gradients"]),
        (decomposed, ((4, 4, 8),), ["dots", "attention"], ["product", "attention_gradients"]),
        (torch.add, ((4, 8), (4, 8)), [], []),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pairs", [True, False], ids=["avx512_bf16", "avx2"])
def test_routines_are_told_from_the_operators(
    monkeypatch: pytest.MonkeyPatch,
    pairs: bool,
    function: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    inference: list[str],
    more_in_training: list[str],
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(product, "has_feature", lambda name: pairs)
    monkeypatch.setattr(product, "has_tiles", lambda: False)
    gm = graph_of(function, *(torch.randn(s, dtype=dtype) for s in shapes))
    for train, names in (False, inference), (True, inference + more_in_training):
        library = dtype == torch.float64 or (function is F.conv2d and dtype == torch.bfloat16)
        known = set() if library else {Group.of(n, dtype) for n in names}
        if dtype == torch.bfloat16 and not pairs and "product_transposed" in names:
            known = {Group.of("product", dtype)}
        assert sorted(expected_groups(gm, train, FACTS, lambda which: True)) == sorted(known)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_routines_of_what_is_computed_in_float32_are_told(train: bool, dtype: torch.dtype) -> None:
    halves = frozenset({torch.bfloat16, torch.float16})
    operators = (aten.convolution.default, aten.mm.default, ATTENTION_FORWARD)
    facts = replace(FACTS, in_float32=dict.fromkeys(operators, halves))
    gradients: tuple[list[str], ...] = (["convolution_filters"], [], ["attention_gradients"])
    for function, shapes, name, more in zip(
        (F.conv2d, F.linear, attend),
        (((1, 2, 8, 8), (3, 2, 3, 3)), ((100, 8), (6, 8)), ((1, 2, 8, 4),)),
        ("convolution", "product", "attention"), gradients, strict=True,
    ):  # fmt: skip
        gm = graph_of(function, *(torch.randn(s, dtype=dtype) for s in shapes))
        names = [name, *(more if train else [])] if dtype in halves else []
        told = expected_groups(gm, train, facts, lambda which: True)
        assert sorted(told) == sorted(Group(n, "") for n in names)


@pytest.mark.parametrize(
    ("rows", "name"), [(1, "dots"), (4, "product_transposed"), (300, "product")]
)
def test_routines_of_tile_registers_are_told(
    monkeypatch: pytest.MonkeyPatch, rows: int, name: str
) -> None:
    monkeypatch.setattr(product, "has_tiles", lambda: True)
    x, w = (torch.randn(n, 8).to(torch.bfloat16) for n in (rows, 6))
    told = expected_groups(graph_of(F.linear, x, w), False, FACTS, lambda which: True)
    assert told == [Group.of(name, torch.bfloat16)]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_small_images_and_steps_are_told(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that lie channels last are convolved otherwise, but for gradients of more filters."""
    monkeypatch.setattr(choice, "limits", lambda: WIDE_CONVOLUTIONS)

    def told(filters: int, size: int, **options: Any) -> list[str]:
        x, w = torch.randn(1, 32, size, size), torch.randn(filters, 32, 3, 3)
        gm = graph_of(lambda x, w: F.conv2d(x, w, **options), x, w)
        return [
            g.name
            for g in expected_groups(gm, train, FACTS, lambda which: True)
            if g.name.startswith("im2col")
        ]

    def depthwise(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, w, groups=32), w.expand(-1, 32, -1, -1))

    gradient = ["im2col_filters"] if train else []
    assert told(32, 18) == ["im2col", *gradient]
    assert told(32, 19) == []
    assert told(31, 18) == gradient
    assert told(15, 18) == []
    assert told(32, 60, stride=2) == (["im2col"] if train else []), "the gradient of images"
    gm = graph_of(depthwise, torch.randn(1, 32, 9, 9), torch.randn(32, 1, 3, 3))
    gradients = ["depthwise_gradients_3", "im2col_filters"] if train else []
    names = ["depthwise_3", *gradients]
    assert expected_groups(gm, train, FACTS, lambda which: True) == [
        Group(name, "") for name in names
    ]


@pytest.mark.parametrize(
    ("shapes", "options", "names"),
    [
        (((2, 8, 12, 12), (6, 8, 3, 3)), {"padding": "same"}, ["convolution"]),
        (((2, 8, 12), (6, 8, 3)), {"stride": 2, "padding": "valid"}, ["convolution"]),
        (((4, 64, 8, 8), (40, 64, 3, 3)), {"padding": (1, 1)}, ["im2col"]),
        (((1, 8, 24, 24), (6, 8, 1, 1)), {}, ["product"]),
        (((4, 256, 34, 34), (512, 256, 3, 3)), {}, []),
        (((2, 8, 20, 16), (8, 6, 2, 2)), {"stride": 2, "output_padding": 0}, ["product"]),
        (((2, 8, 20, 16), (8, 6, 3, 3)), {"stride": 2, "output_padding": 1}, []),
    ],
)
def test_convolutions_are_told_as_they_are_lowered(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], names: list[str]
) -> None:
    x, w = (torch.randn(shape) for shape in shapes)
    convolve = F.conv2d if x.ndim == 4 else F.conv1d
    if "output_padding" in options:
        convolve = F.conv_transpose2d
    gm = graph_of(lambda x, w: convolve(x, w, **options), x, w)
    assert expected_groups(gm, False, FACTS, lambda which: True) == [
        Group(name, "") for name in names
    ]


def test_routines_of_checkpointed_regions_are_told() -> None:
    def layer(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)

    gm = graph_of(layer, torch.randn(1, 2, 8, 4, requires_grad=True))
    assert ATTENTION in expected_groups(gm, False, FACTS, lambda which: True)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first line of every unit that is compiled."""
    seen: list[str] = []
    compile_shared = units_module.compile_shared

    def count(toolchain: Any, files: dict[str, str], main: str, *rest: Any) -> bytes:
        seen.append(files[main].splitlines()[0])
        return compile_shared(toolchain, files, main, *rest)

    monkeypatch.setattr(units_module, "compile_shared", count)
    return seen


def opened(folder: Path, begun: Begun, **settings: Any) -> Units:
    config = Config.from_env().with_options({"cache_dir": folder, **settings}, None)
    return Units.open(config, Cache.open(config), begun)


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_was_begun_is_taken_up(tmp_path: Path, compilations: list[str], jobs: int) -> None:
    begun: Begun = {}
    units = opened(tmp_path, begun, compile_jobs=jobs)
    units.begin([PRODUCT, ATTENTION])
    units.begin([PRODUCT])
    assert len(begun) == 3, "the driver besides; nothing is begun twice"
    found = units.build({"dicp_product": "", "dicp_product_biased": ""}, {})
    assert found["dicp_product"] == found["dicp_product_biased"]
    units.build({"dicp_attention": ""}, {})
    assert not begun
    assert sorted(compilations)[:2] == ['#include "attention.h"', '#include "product.h"']
    assert len(compilations) == 3
    units.begin([PRODUCT, ATTENTION])
    assert not begun, "the cache has them"


def test_the_driver_is_begun_for_any_graph(tmp_path: Path, compilations: list[str]) -> None:
    begun: Begun = {}
    units = opened(tmp_path, begun)
    units.begin([])
    (driver,) = begun.values()
    assert driver.exception() is None and len(compilations) == 1
    units.build({}, {})
    assert not begun and len(compilations) == 1


def test_beginning_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, finished = threading.Event(), []

    def slow(toolchain: Any, files: dict[str, str], main: str, *rest: Any) -> bytes:
        assert begun.wait(60), "it is waited for"
        finished.append(main)
        return b""

    monkeypatch.setattr(units_module, "compile_shared", slow)
    units = opened(tmp_path, {})
    units.begin([])
    begun.set()
    units.driver()
    assert len(finished) == 1


def test_a_failure_is_reported_where_the_routine_is_needed(tmp_path: Path) -> None:
    begun: Begun = {}
    units = opened(tmp_path, begun, cxx_flags=("-fno-such-flag",))
    units.begin([PRODUCT])
    with pytest.raises(CompilerError, match="no-such-flag"):
        units.build({"dicp_product": ""}, {})


def test_what_was_begun_and_failed_is_compiled_again(
    tmp_path: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt may have ended it, or a fork have left it to its parent."""
    begun: Begun = {}
    units = opened(tmp_path, begun)
    key = units._routines_key(PRODUCT)
    failed, waiting = Future[None](), Future[None]()
    failed.set_exception(CompilerError("cpu", ["cxx"], "interrupted"))
    begun |= {(os.getpid(), key): failed, (os.getpid() + 1, key): waiting}
    assert units.build({"dicp_product": ""}, {})["dicp_product"] == key
    assert list(begun.values()) == [waiting] and len(compilations) == 2


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_compilers(tmp_path: Path) -> None:
    """Nothing runs on, and the next compilation in the process is as any other."""
    hang, log = tmp_path / "hang", tmp_path / "pids"
    hang.touch()
    real = find_compiler("cpu", "")[0][0]
    cxx = tmp_path / "cxx"
    body = f'[ "$1" = --version ] || [ ! -e {hang} ] || {{ echo $$ >> {log}; sleep 60; }}'
    cxx.write_text(f'#!/bin/sh\n{body}\nexec {real} "$@"\n')
    cxx.chmod(0o755)
    units = opened(tmp_path / "cache", {}, cxx=str(cxx), compile_jobs=2)

    def interrupt() -> None:
        while not log.exists():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        units.build({"dicp_product": ""}, {})
    assert time.perf_counter() - began < 20
    hang.unlink()
    assert gone(log)
    units = opened(tmp_path / "cache", {}, cxx=str(cxx))
    assert units.build({"dicp_product": ""}, {})


def test_backend_begins_before_the_front_end_is_done(
    tmp_path: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    begin, build = Units.begin, Units.build
    monkeypatch.setattr(
        Units, "begin", lambda self, groups: (order.append("begin"), begin(self, groups))[1]
    )
    monkeypatch.setattr(
        Units, "build", lambda self, *args: (order.append("build"), build(self, *args))[1]
    )
    monkeypatch.setattr(target_module, "verdict", lambda *_: Verdict("onednn", 2.0, 2.0, 2.0))
    x, w = torch.randn(40, 24), torch.randn(16, 24)
    torch._dynamo.reset()
    options = {"cache_dir": tmp_path}
    got = torch.compile(F.linear, backend="cpugraph", options=options)(x, w)
    torch.testing.assert_close(got, F.linear(x, w))
    assert order == ["begin", "build"]
    assert compilations.count('#include "product.h"') == 1
