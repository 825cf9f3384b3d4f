"""Huawei Ascend: GE graphs written as C++, built offline, run through ACL or in the simulator."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from dicp.cache import Cache, Entry, key_of
from dicp.config import Config
from dicp.fused_attention import ANY_ATTENTION
from dicp.graphop.builder import Builder
from dicp.graphop.program import Graph, Item, Node, Slot
from dicp.graphop.sdk_target import SdkTarget
from dicp.graphop.target import GraphUnit
from dicp.graphop.text import Text
from dicp.target import Check, Facts
from dicp.toolchain import address_of
from dicp.torch_private import FakeTensorMode
from dicp.vendor.ascend.codegen import ENTRY, input_shapes, node_names, render_graph, render_static
from dicp.vendor.ascend.doctor import checks
from dicp.vendor.ascend.fuse import fuse
from dicp.vendor.ascend.fuse.inplace import WRITING
from dicp.vendor.ascend.gears import refusal
from dicp.vendor.ascend.installation import Cann
from dicp.vendor.ascend.layout import with_formats
from dicp.vendor.ascend.probe import EVERY_OPERATOR, Installed, probed
from dicp.vendor.ascend.prototypes import DTYPES, PROTOTYPES
from dicp.vendor.ascend.rules import RULES
from dicp.vendor.ascend.rules.core import Ge
from dicp.vendor.ascend.runtime import Driver, Model
from dicp.vendor.ascend.sink import sunk
from dicp.vendor.ascend.toolchain import Toolchain, compile_shared, find_toolchain, load_driver

PRECISION_MODES = {
    "keep": "must_keep_origin_dtype",
    "fast": "must_keep_origin_dtype",
    "half": "allow_mix_precision",
}
"""GE's names for what `precision` says: which dtypes it keeps."""
UNLISTED = tuple(
    f"{kind} does not take float64"
    for kind, prototype in sorted(PROTOTYPES.items())
    if prototype.inputs and torch.float64 not in prototype.inputs[0].dtypes
)
"""Reasons that public headers give: of float64 they list less than of narrower types."""


def _marks_hidden_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Products and a softmax do (rules/attention.py), and GE's fused operator for training, if the
    maximum that it returns for a row of -inf is -inf. PyTorch's, which runs where GE has no
    product of the dtype, gives 0 for such rows."""
    return q.dtype in PROTOTYPES["BatchMatMulV2"].inputs[0].dtypes


ATTENTION = replace(ANY_ATTENTION, exact_masks=True, marks_hidden_rows=_marks_hidden_rows)


class AscendTarget(SdkTarget[Toolchain, Driver]):
    """Compiles for Ascend chips; without CANN, for the simulator."""

    name = "ascend"
    sdk = "CANN"
    device_type = "npu"
    platform = "ascend"
    chips = ("Ascend A2", "Ascend A3")
    facts = Facts(
        dtypes=frozenset(DTYPES),
        symbolic_shapes=True,
        keep=RULES.ops(),
        fusions=frozenset({"layer_norm", "rms_norm", "gelu"}),
        attention={"cpu": ATTENTION, "npu": ATTENTION},
        frozen_fusions=frozenset({"conv_bn"}),
    )
    rules = RULES
    limits = UNLISTED
    writing = WRITING
    needs_input = True
    simulator = "dicp's simulator of GE and ACL"

    def __init__(self) -> None:
        super().__init__()
        self._probed: dict[Cann, Installed] = {}

    def installed(self, config: Config) -> Installed:
        """The operators that graphs may have: the installation's; all where there is none."""
        return self._installed(find_toolchain(config), Cache.open(config))

    def _installed(self, toolchain: Toolchain, cache: Cache) -> Installed:
        cann = toolchain.declared
        if cann is None:
            return EVERY_OPERATOR
        if cann not in self._probed:
            self._probed[cann] = probed(cann, cache)
        return self._probed[cann]

    # ---- graphs of GE operators -----------------------------------------------------------------

    def make_builder(self, fake_mode: FakeTensorMode | None, config: Config) -> Builder:
        return Ge(fake_mode, self.installed(config))

    def fuse(
        self, builder: Builder, items: Sequence[Item], outputs: Sequence[object]
    ) -> Sequence[Item]:
        items = fuse(builder, items, outputs)
        items, moved = sunk(builder, items)
        return fuse(builder, items, outputs) if moved else items

    def assign_formats(self, builder: Builder, graph: Graph, static: Collection[Slot]) -> Graph:
        return with_formats(builder, graph, static)

    def bucket_refusal(self, graph: Graph) -> str | None:
        return refusal(graph)

    # ---- source, model, run ---------------------------------------------------------------------

    def render_graph(self, graph: Graph, config: Config) -> str:
        return render_graph(graph, self.installed(config).ports)

    def render_static(self, graph: Graph, config: Config) -> tuple[Text, Text]:
        return render_static(graph, self.installed(config).ports), Text.of("")

    def graph_options(self, graph: Graph, config: Config) -> str:
        return input_shapes(graph)

    def node_names(self, graph: Graph) -> Mapping[Node, str]:
        return node_names(graph)

    def identity(self, cache: Cache, config: Config) -> Sequence[str]:
        toolchain = find_toolchain(config)
        soc = self.driver(toolchain, cache).soc()
        return [toolchain.identity, soc, PRECISION_MODES[config.precision]]

    def compile(self, unit: GraphUnit, cache: Cache, config: Config) -> Mapping[str, bytes]:
        toolchain = find_toolchain(config)
        driver = self.driver(toolchain, cache)
        headers = (self._headers, cache)
        shared = compile_shared(
            toolchain, unit.text, symbols=(ENTRY,), headers=headers, origins=unit.origins
        )
        define = address_of(self.name, shared, ENTRY)
        precision = PRECISION_MODES[config.precision]
        model = driver.build(define, unit.name, precision, unit.options)
        facts = {"soc": driver.soc()}
        return {"graph.cpp": unit.text.encode(), "graph.om": model,
                "facts.json": json.dumps(facts).encode()}  # fmt: skip

    def launch(self, unit: GraphUnit, built: Entry, cache: Cache, config: Config) -> Model:
        driver = self.driver(find_toolchain(config), cache)
        soc = json.loads(built.read("facts.json"))["soc"]
        return Model(driver, built.read("graph.om"), soc, bool(unit.options), unit.written)

    def find_toolchain(self, config: Config) -> Toolchain:
        return find_toolchain(config)

    def open_driver(self, toolchain: Toolchain, cache: Cache) -> Driver:
        driver = Driver(load_driver(toolchain, cache), toolchain.simulated)
        if driver.simulator is not None:
            driver.simulator.ports = self._installed(toolchain, cache).ports
        return driver

    # ---- identity and health --------------------------------------------------------------------

    def fingerprint(self, config: Config) -> str:
        toolchain = find_toolchain(config)
        if toolchain.simulated:
            return key_of(toolchain.identity)
        return key_of(toolchain.identity, self.driver(toolchain, Cache.open(config)).soc())

    def sdk_checks(self, toolchain: Toolchain, config: Config) -> list[Check]:
        cache = Cache.open(config)
        cann, soc = toolchain.declared, lambda: self.driver(toolchain, cache).soc()
        return [] if cann is None else checks(cann, cache, soc)
