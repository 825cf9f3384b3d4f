"""Enflame Tops: HLIR graphs written as C++, compiled by TopsRider, run on a device or simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from dicp.cache import Cache, Entry, key_of
from dicp.config import BOOLEAN, WORDS, Config, vendor_option
from dicp.graphop.builder import Builder
from dicp.graphop.padding import padding_refusal
from dicp.graphop.program import Graph, Item, Node
from dicp.graphop.rewrite import rewritten
from dicp.graphop.rules import RULES
from dicp.graphop.simulator import Headers
from dicp.graphop.target import GraphTarget, GraphUnit
from dicp.graphop.text import Text
from dicp.target import Check, Facts, tensors_of
from dicp.toolchain import address_of
from dicp.torch_private import FakeTensorMode
from dicp.vendor.tops.codegen import ENTRY, node_names, render_graph, stated_types
from dicp.vendor.tops.doctor import checks
from dicp.vendor.tops.forms import Tops
from dicp.vendor.tops.layout import cancelled
from dicp.vendor.tops.padding import CHECKS, FLOWS, MASKS
from dicp.vendor.tops.prototypes import DTYPES
from dicp.vendor.tops.runtime import Driver, Executable
from dicp.vendor.tops.semantics import SEMANTICS
from dicp.vendor.tops.toolchain import Toolchain, compile_shared, find_toolchain, load_driver

GRAPH_FLAGS = (
    "-arch=gcu200", "-resource=4c24s",
    "-hlir=hlir-training-pipeline{tensor-split=true dynamic-shape=false}",
)  # fmt: skip
HOST_TENSORS = "a tensor of the host, where there is a device; runs_on='device' has it copied"


class TopsTarget(GraphTarget):
    """Compiles for Enflame chips; without TopsRider, for the simulator."""

    name = "tops"
    device_type = "gcu"
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

    def __init__(self) -> None:
        self._drivers: dict[str, Driver] = {}
        self._headers = Headers(self.name)

    def devices(self, config: Config) -> frozenset[str]:
        return super().devices(config) | ({"dipu"} if config.vendor.get("dipu") else set())

    # ---- graphs of HLIR operators ---------------------------------------------------------------

    def make_builder(self, fake_mode: FakeTensorMode | None, config: Config) -> Builder:
        return Tops(fake_mode)

    def refuses(self, node: fx.Node, config: Config) -> str:
        tensors = tensors_of(node)
        if not find_toolchain(config).simulated and config.runs_on != "device":
            if tensors and all(tensor.device.type == "cpu" for tensor in tensors):
                return HOST_TENSORS
        results = node.meta.get("val")
        unread = results if isinstance(results, (tuple, list)) else ()  # such as saved statistics
        if any(0 in t.shape for t in tensors if not any(t is result for result in unread)):
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
        driver = self._driver(toolchain, cache)
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
        driver = self._driver(find_toolchain(config), cache)
        return Executable(driver, built.read("graph.bin"), unit.name)

    def _driver(self, toolchain: Toolchain, cache: Cache) -> Driver:
        if toolchain.identity not in self._drivers:
            library = load_driver(toolchain, cache)
            self._drivers[toolchain.identity] = Driver(library, toolchain.simulated)
        return self._drivers[toolchain.identity]

    # ---- identity and health --------------------------------------------------------------------

    def simulated(self, config: Config) -> bool:
        return find_toolchain(config).simulated

    def fingerprint(self, config: Config) -> str:
        return key_of(find_toolchain(config).identity)

    def simulated_counts(self) -> Mapping[str, int]:
        """What the simulator has run in this process: launches, operators, transposes."""
        return next((d.simulator.counts for d in self._drivers.values() if d.simulator), {})

    def doctor(self, config: Config) -> list[Check]:
        return checks(config, self._devices)

    def _devices(self, config: Config) -> int:
        return self._driver(find_toolchain(config), Cache.open(config)).devices()


def _flags(config: Config) -> Sequence[str]:
    """What the graph compiler is told."""
    return tuple(config.vendor.get("graph_flags", GRAPH_FLAGS))
