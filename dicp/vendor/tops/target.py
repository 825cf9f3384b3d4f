"""Enflame Tops: HLIR graphs written as C++, compiled by TopsRider, run on a device or simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from dicp.cache import Cache, Entry, key_of
from dicp.config import BOOLEAN, WORDS, Config, vendor_option
from dicp.errors import DicpError
from dicp.graphop.builder import Builder
from dicp.graphop.padding import padding_refusal
from dicp.graphop.program import Graph, Item, Node
from dicp.graphop.rewrite import rewritten
from dicp.graphop.rules import RULES
from dicp.graphop.sdk_target import SdkTarget
from dicp.graphop.target import GraphUnit
from dicp.graphop.text import Text
from dicp.target import Check, Facts, tensors_of
from dicp.toolchain import address_of
from dicp.torch_private import FakeTensorMode
from dicp.vendor.tops.codegen import ENTRY, node_names, render_graph, stated_types
from dicp.vendor.tops.forms import Tops
from dicp.vendor.tops.layout import cancelled
from dicp.vendor.tops.padding import CHECKS, FLOWS, MASKS
from dicp.vendor.tops.prototypes import DTYPES
from dicp.vendor.tops.runtime import Driver, Executable
from dicp.vendor.tops.semantics import SEMANTICS
from dicp.vendor.tops.toolchain import Toolchain, compile_shared, find_toolchain, load_driver

NO_DEVICE = "See that the driver is loaded and that the devices are visible and yours."
GRAPH_FLAGS = (
    "-arch=gcu200", "-resource=4c24s",
    "-hlir=hlir-training-pipeline{tensor-split=true dynamic-shape=false}",
)  # fmt: skip


class TopsTarget(SdkTarget[Toolchain, Driver]):
    """Compiles for Enflame chips; without TopsRider, for the simulator."""

    name = "tops"
    sdk = "TopsRider"
    device_type = "gcu"
    platform = "tops"
    chips = ("Enflame",)
    facts = Facts(
        dtypes=frozenset(DTYPES),
        symbolic_shapes=False,
        keep=RULES.ops(),
        fusions=frozenset({"gelu"}),
        frozen_fusions=frozenset({"conv_bn"}),
    )
    rules = RULES
    simulator = "dicp's simulator of HLIR"
    limits = ("dtype ", "an empty tensor", "HLIR has ")
    options = (
        vendor_option("graph_flags", WORDS, "DICP_TOPS_FLAGS", "what TopsRider's graph compiler is "
                      "told: chip, clusters, passes", default=GRAPH_FLAGS),
        vendor_option("dipu", BOOLEAN, "DICP_TOPS_DIPU", "take tensors of the eager device `dipu`, "
                      "too, and leave results there", default=False, changes_code=False),
    )  # fmt: skip

    def devices(self, config: Config) -> frozenset[str]:
        return super().devices(config) | ({"dipu"} if config.vendor.get("dipu") else set())

    # ---- graphs of HLIR operators ---------------------------------------------------------------

    def make_builder(self, fake_mode: FakeTensorMode | None, config: Config) -> Builder:
        return Tops(fake_mode)

    def refuses(self, node: fx.Node, config: Config) -> str:
        reason = super().refuses(node, config)
        if reason:
            return reason
        results = node.meta.get("val")
        unread = results if isinstance(results, (tuple, list)) else ()  # such as saved statistics
        if any(0 in t.shape for t in tensors_of(node) if not any(t is result for result in unread)):
            return "an empty tensor, which HLIR does not have"
        return ""

    def fuse(
        self, builder: Builder, items: Sequence[Item], outputs: Sequence[object]
    ) -> Sequence[Item]:
        return cancelled(builder, items, outputs)

    def mask_padding(self, builder: Builder, items: Sequence[Item]) -> Sequence[Item]:
        return rewritten(builder, items, MASKS)

    def bucket_refusal(self, graph: Graph) -> str | None:
        return padding_refusal(graph, CHECKS, SEMANTICS, FLOWS)

    # ---- source, binary, run --------------------------------------------------------------------

    def render_graph(self, graph: Graph, config: Config) -> str:
        return render_graph(graph).shown()

    def graph_options(self, graph: Graph, config: Config) -> str:
        return stated_types(graph).shown()

    def render_static(self, graph: Graph, config: Config) -> tuple[Text, Text]:
        return render_graph(graph), stated_types(graph)

    def node_names(self, graph: Graph) -> Mapping[Node, str]:
        return node_names(graph)

    def identity(self, cache: Cache, config: Config) -> Sequence[str]:
        return [find_toolchain(config).identity, *_flags(config)]

    def compile(self, unit: GraphUnit, cache: Cache, config: Config) -> Mapping[str, bytes]:
        toolchain = find_toolchain(config)
        driver = self.driver(toolchain, cache)
        headers = (self._headers, cache)
        shared = compile_shared(
            toolchain, unit.text, symbols=(ENTRY,), headers=headers, origins=unit.origins
        )
        with driver.building:
            if driver.simulator is not None:
                driver.simulator.stated = unit.options.split("\n")
            binary = driver.build(address_of(self.name, shared, ENTRY), _flags(config))
        return {"graph.cpp": unit.text.encode(), "graph.bin": binary}

    def launch(self, unit: GraphUnit, built: Entry, cache: Cache, config: Config) -> Executable:
        driver = self.driver(find_toolchain(config), cache)
        return Executable(driver, built.read("graph.bin"), unit.name)

    def find_toolchain(self, config: Config) -> Toolchain:
        return find_toolchain(config)

    def open_driver(self, toolchain: Toolchain, cache: Cache) -> Driver:
        return Driver(load_driver(toolchain, cache), toolchain.simulated)

    # ---- identity and health --------------------------------------------------------------------

    def fingerprint(self, config: Config) -> str:
        return key_of(find_toolchain(config).identity)

    def sdk_checks(self, toolchain: Toolchain, config: Config) -> list[Check]:
        sdk = toolchain.sdk
        if sdk is None:
            return []
        installed = Check(self.sdk, True, f"{sdk.root}, headers {sdk.prefix}/")
        try:
            count = self.driver(toolchain, Cache.open(config)).devices()
        except DicpError as error:
            return [installed, Check("devices", False, str(error), NO_DEVICE)]
        return [installed, Check("devices", count > 0, str(count), "" if count else NO_DEVICE)]


def _flags(config: Config) -> Sequence[str]:
    """What the graph compiler is told."""
    return tuple(config.vendor.get("graph_flags", GRAPH_FLAGS))
