"""The contract of installed targets: what is checked when one is loaded, priority, own options."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp import discovery
from dicp import target as target_module
from dicp.config import BOOLEAN, COUNT, Config, vendor_option
from dicp.dynamo_bridge import backend
from dicp.dynamo_bridge.backend import Backend, load_target, target_for_devices
from dicp.dynamo_bridge.graph_cache import source_of
from dicp.errors import FallbackWarning, InvalidTargetError, UnknownOptionError
from dicp.fused_attention import ANY_ATTENTION
from dicp.rules import RuleTable
from dicp.target import Facts, find_target
from dicp.vendor.cpu import CpuTarget

FACTS = Facts(dtypes=frozenset({torch.float32}))
WANTS_GELU = Facts(FACTS.dtypes, fusions=frozenset({"gelu"}))
ATTENDS = Facts(FACTS.dtypes, attention={"x": ANY_ATTENTION})
NUMBERS = itertools.count()


class Chip(CpuTarget):
    """The host under another name and device."""

    device_type = "chip"
    options = (
        vendor_option("turbo", BOOLEAN, "DICP_CHIP_TURBO", "clocks up", default=False),
        vendor_option("lanes", COUNT, "DICP_CHIP_LANES", "lanes", default=4, changes_code=False),
    )


def install(monkeypatch: pytest.MonkeyPatch, **made: Any) -> None:
    """Registers targets by what each of them is: a class."""
    points = {}
    for name, cls in made.items():
        attribute = f"made{next(NUMBERS)}"
        globals()[attribute] = cls
        points[name] = EntryPoint(name, f"{__name__}:{attribute}", "dicp.targets")
    for module in (discovery, target_module, backend):
        monkeypatch.setattr(module, "discover", lambda: points)
    find_target.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    find_target.cache_clear()


def chip(name: str, **facts: Any) -> type[Chip]:
    return type("Chip", (Chip,), {"name": name, **facts})


BROKEN = {
    "no_target": (int, "int is no dicp.target.Target"),
    "other_name": (chip("mychip"), "it calls itself 'mychip', unlike its entry point"),
    "no_facts": (chip("no_facts", facts=None), "its facts is not a Facts"),
    "dtypes": (
        chip("dtypes", facts=Facts(dtypes=frozenset({"float32"}))),  # type: ignore[arg-type]
        "facts.dtypes holds float32, not torch.dtype",
    ),
    "keep": (
        chip("keep", facts=Facts(FACTS.dtypes, keep=frozenset({"aten.sqrt"}))),
        "facts.keep holds aten.sqrt, not overloads such as",
    ),
    "keep_list": (
        chip("keep_list", facts=Facts(FACTS.dtypes, keep=[])),  # type: ignore[arg-type]
        "facts.keep is a list, not a frozenset",
    ),
    "fusions_text": (
        chip("fusions_text", facts=Facts(FACTS.dtypes, fusions="gelu")),  # type: ignore[arg-type]
        "facts.fusions is a str, not a frozenset",
    ),
    "attention_list": (
        chip("attention_list", facts=Facts(FACTS.dtypes, attention=["x"])),  # type: ignore[arg-type]
        "facts.attention is a list, not a Mapping",
    ),
    "attention_text": (
        chip("attention_text", facts=Facts(FACTS.dtypes, attention={"x": "any"})),  # type: ignore[dict-item]
        "facts.attention holds any, not dicp.fused_attention.FusedAttention",
    ),
    "channels_last": (
        chip("channels_last", facts=Facts(FACTS.dtypes, channels_last=frozenset({"bfloat16"}))),  # type: ignore[arg-type]
        "facts.channels_last holds bfloat16, not torch.dtype",
    ),
    "rules": (chip("rules", rules={}), "its rules is not a RuleTable"),
    "priority": (chip("priority", priority="high"), "its priority is not a int"),
    "options": (chip("options", options=None), "its options is not a Sequence"),
    "option": (chip("option", options=["turbo"]), "is not made by dicp.config.vendor_option"),
    "shared_option": (
        chip(
            "shared_option",
            options=[vendor_option("fuse", BOOLEAN, "DICP_CHIP_FUSE", "x", default=False)],
        ),
        "option 'fuse': 'fuse' is another's",
    ),
    "variable": (
        chip("variable", options=[vendor_option("f", BOOLEAN, "DICP_FUSE", "x", default=False)]),
        "option 'f': 'DICP_FUSE' is another's",
    ),
    "option_twice": (
        chip(
            "option_twice",
            options=[vendor_option("f", COUNT, f"DICP_F{k}", "x", default=0) for k in range(2)],
        ),
        "option 'f': 'f' is another's",
    ),
    "default": (
        chip("default", options=[vendor_option("f", COUNT, "DICP_F", "x", default="two")]),
        "the default of option 'f' is 'two'; expected a whole number",
    ),
    "kind": (
        chip("kind", options=[vendor_option("f", int, "DICP_F", "x", default=0)]),  # type: ignore[arg-type]
        "is not made by dicp.config.vendor_option",
    ),
    "fusion": (
        chip("fusion", facts=Facts(FACTS.dtypes, fusions=frozenset({"gelo"}))),
        r"it wants fusions \['gelo'\], which are none of \['conv_bn'",
    ),
    "fusion_without_rule": (
        chip(
            "fusion_without_rule",
            rules=RuleTable(),
            facts=Facts(FACTS.dtypes, fusions=frozenset({"gelu"})),
        ),
        r"it wants the fusion 'gelu' and has no rule for aten\.gelu\.default",
    ),
    "attention_as_fusion": (
        chip("attention_as_fusion", facts=Facts(FACTS.dtypes, fusions=frozenset({"attention"}))),
        r"attention is stated by Facts\.attention",
    ),
    "attention_without_rule": (
        chip(
            "attention_without_rule",
            rules=RuleTable(),
            facts=Facts(FACTS.dtypes, attention={"x": ANY_ATTENTION}),
        ),
        r"it states attention on 'x' and has no rule for aten\._scaled_dot_product",
    ),
    "too_many": (
        chip("too_many", fingerprint=lambda self: ""),
        r"its fingerprint, at .*test_target.py:\d+, does not take \(config\): too many positional",
    ),
    "too_few": (
        chip("too_few", compile=lambda self, sources, cache, config, fast: {}),
        r"its compile, at .*, does not take \(sources, cache, config\): missing .* 'fast'",
    ),
    "no_function": (chip("no_function", doctor="all right"), "its doctor is a str, not a function"),
    "raises": (
        lambda: 1 // 0,
        rf"loading it raises ZeroDivisionError: .*, at {re.escape(__file__)}:\d+\. Fix",
    ),
    "unparsed": (
        lambda: exec(compile("\n\n(", "chip/rules.py", "exec")),
        r"loading it raises SyntaxError: '\(' was never closed .*, at chip/rules\.py:3\. Fix",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_target_is_named_with_what_is_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, message = BROKEN[name]
    install(monkeypatch, **{name: made})
    with pytest.raises(InvalidTargetError, match=message):
        load_target(name)


@pytest.mark.parametrize("op", ["aten.sqrt.default", torch.sqrt])
def test_a_rule_for_what_is_no_operator_is_refused(op: Any) -> None:
    with pytest.raises(TypeError, match=r"for an operator such as torch\.ops\.aten\.sqrt, not"):
        RuleTable().register(op)(lambda builder, x: x)


def test_a_decorator_without_a_call_is_refused() -> None:
    with pytest.raises(TypeError, match="a rule is for an operator such as"):

        @RuleTable().register
        def sqrt(builder: Any, x: Any) -> Any:
            return x


def test_a_table_has_one_rule_for_an_operator() -> None:
    aten = torch.ops.aten
    table, other = RuleTable(), RuleTable()
    table.add(aten.add, lambda builder, x: x)
    with pytest.raises(ValueError, match=r"aten\.add\.Tensor has a rule in this table; `merged`"):
        table.add(aten.add.Tensor, lambda builder, x: x)
    other.add(aten.add.Tensor, lambda builder, x: None)
    found = table.merged(other).get(aten.add.Tensor)
    assert found is not None and found.function(None, 1) is None


def test_a_rule_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'compile' is none of compiled, library, view, eager"):
        RuleTable().add(torch.ops.aten.sqrt.default, lambda builder, x: x, "compile")  # type: ignore[arg-type]


def test_packages_that_register_one_name_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("acme", "zenith"):
        info = tmp_path / f"{package}_dicp-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package}-dicp\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[dicp.targets]\nrocket = {package}:Rocket\n")
    monkeypatch.syspath_prepend(tmp_path)
    both = r"several packages register the name: (acme|zenith)-dicp 2\.0 \(\1:Rocket\), "
    with pytest.raises(InvalidTargetError, match=both):
        find_target("rocket")


def test_the_highest_priority_has_the_device_and_broken_targets_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, a=chip("a"), b=chip("b", priority=1), c=int)
    with pytest.warns(FallbackWarning, match="'c'.*cannot be used"):
        assert target_for_devices({"chip"}).name == "b"


def test_the_option_target_chooses_for_dicp(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, a=chip("a", device_type="cpu"), b=chip("b", device_type="cpu"))
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    monkeypatch.setenv("DICP_TARGET", "b")
    assert Backend()._target_and_config(gm, [torch.ones(2)], {})[0].name == "b"
    assert Backend()._target_and_config(gm, [torch.ones(2)], {"target": "a"})[0].name == "a"


def test_options_of_a_target_are_read_checked_and_part_of_the_key() -> None:
    own = Chip.options
    assert Config.from_env({"DICP_CHIP_TURBO": "1"}, own).vendor == {"turbo": True, "lanes": 4}
    config = Config.from_env({}, own)
    changed = config.with_options({"turbo": "on"}, vendor=own)
    assert changed.vendor == {"turbo": True, "lanes": 4}
    assert changed.key(own) != config.key(own)
    other = config.with_options({"lanes": 8}, vendor=own)
    assert other.vendor["lanes"] == 8 and other.key(own) == config.key(own)
    with pytest.raises(UnknownOptionError):
        config.with_options({"turbo": True})


@pytest.mark.parametrize("changed", ["rules.py", "kernels/reduce.cu", "costs.json", "unit.tpl"])
def test_a_changed_file_of_a_vendors_package_changes_its_identity(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "acme_dicp"
    package.mkdir()
    (package / "__init__.py").write_text("from acme_dicp.chip import Chip\n")
    (package / "chip.py").write_text("class Chip: ...\n")
    (package / changed).parent.mkdir(exist_ok=True)
    (package / changed).write_text("FACTOR = 2\n")
    (tmp_path / "acme_single.py").write_text("class Chip: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("acme_dicp", "acme_dicp.chip", "acme_single"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    kinds = [importlib.import_module(name).Chip for name in ("acme_dicp", "acme_single")]

    def identities() -> list[str]:
        source_of.cache_clear()
        return [source_of(kind) for kind in kinds]

    before = identities()
    (package / "__pycache__").mkdir(exist_ok=True)
    for name in ("other.cpython-312.pyc", "other.cpython-312.pyc.140142"):  # and a partial one
        (package / "__pycache__" / name).write_bytes(b"compiled by another Python")
    assert before == identities()
    (package / changed).write_text("FACTOR = 3.5\n")
    after = identities()
    assert after[0] != before[0] and after[1] == before[1]
    assert source_of(CpuTarget) == ""
