"""The target's stages: a graph after its passes is lowered, rendered, built and loaded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.aot_graph import GraphInfo
from dicp.dynamo_bridge.observe import Observer
from dicp.target import Artifact, Executable, LowerContext, Target


@dataclass(frozen=True)
class Stages:
    """The stages of one target, under one configuration."""

    target: Target
    config: Config
    cache: Cache

    def context(self, info: GraphInfo) -> LowerContext:
        static = frozenset(info.static_inputs)
        return LowerContext(self.config, info.kind, static, self.target.name)

    def run(
        self, gm: fx.GraphModule, info: GraphInfo, observer: Observer
    ) -> tuple[Artifact, Executable]:
        """What is stored of a graph, and its executable.

        Raises CompilerError, GraphRejectedError and what the target's stages raise.
        """
        target, config, report = self.target, self.config, observer.report
        with observer.stage("lower"):
            program = target.lower(gm, self.context(info))
        report.nodes = [*report.nodes, *program.nodes]
        report.kernels = [*report.kernels, *program.kernels()]
        with observer.stage("render"):
            source = target.render(program, config)
        observer.program(target, program, source, gm)
        with observer.stage("build"):
            artifact = target.build(program, source, self.cache, config)
        with observer.stage("load"):
            run = target.load(artifact, self.cache, config)
        return artifact, observer.timed(run, target, program, gm)
