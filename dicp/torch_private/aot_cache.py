"""AOTAutograd's result in the form that is stored, and the key that it is stored under."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import GmWrapper
from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._functorch._aot_autograd.aot_autograd_result import (
    BundledAOTAutogradResult,
    BundledCompiledBackward,
    BundledCompiledForward,
    serialize_graph_module,
)
from torch._inductor import config as inductor_config
from torch._inductor.codecache import FxGraphCache, FxGraphHashDetails

from dicp.torch_private.guards import current_shape_env
from dicp.torch_private.operators import OpOverload, OpOverloadPacket, fills_uninitialized
from dicp.torch_private.tensors import sharing_inputs


def storable_result(aot_config: Any, **parts: Any) -> Any:
    """AOTAutograd's result in the form that is stored."""
    if "min_cut_info_str" in BundledAOTAutogradResult.__dataclass_fields__:
        parts["min_cut_info_str"] = None
    return BundledAOTAutogradResult(
        sanitized_aot_config=(
            aot_config.to_cacheable()
            if hasattr(aot_config, "to_cacheable")
            else graph_compile.sanitize_aot_config(aot_config)
        ),
        aot_joint_graph_str=None,
        aot_forward_graph_str=None,
        aot_backward_graph_str=None,
        forward_time_taken_ns=0,
        backward_time_taken_ns=0,
        **parts,
    )


class NotCacheableError(Exception):
    """AOTAutograd's result for this graph must not be stored; the text says why."""


class _OwnDetails(FxGraphHashDetails):
    """Replaces the hash of what Inductor, PyTorch's own code generator, depends on.

    Computing that imports Inductor and hashes PyTorch's sources, none of which matters here.
    """

    def __init__(self, gm: Any, example_inputs: Any, fx_config: Any, inputs_to_check: Any) -> None:
        self.gm = gm
        self.example_inputs = list(example_inputs)
        self.fx_kwargs: dict[str, object] = {}
        self.cache_key_tag = torch.compiler.config.cache_key_tag
        self.torch_version = f"{torch.__version__} {torch.version.git_version}".encode()
        self.default_dtype = torch.get_default_dtype()
        self.default_device = str(torch.get_default_device())
        self.autocast = [
            f"{device} {torch.get_autocast_dtype(device)}"
            for device in torch._C._autocast_supported_devices()
            if torch.is_autocast_enabled(device)
        ]
        self.deterministic_algorithms_settings = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            fills_uninitialized(),
        )
        shape_env = current_shape_env()
        hints = shape_env.var_to_hint_override if shape_env is not None else {}
        self.var_to_hint_override = {str(name): hints[name] for name in sorted(hints, key=str)}


class _KeyDetails(autograd_cache.AOTAutogradCacheDetails, _OwnDetails):
    """Everything that determines AOTAutograd's result for a graph."""

    shared_memory: list[str]

    def get_triton_source_codes_from_gm(self, gm: torch.fx.GraphModule) -> list[str]:
        return []  # only custom operators hold such sources, and those are not cached at all

    def _init_fx_graph_hash_details(self, gm: Any, example_inputs: Any, fx_config: Any) -> None:
        """Called by releases from 2.13 on, where older ones call `super().__init__`."""
        FxGraphCache._check_can_cache(gm, example_inputs, fx_config)
        _OwnDetails.__init__(self, gm, example_inputs, fx_config, [])


def graph_module_of(gm: Any) -> fx.GraphModule:
    """Dynamo's graph, whose inputs may be flattened."""
    return gm.gm if isinstance(gm, GmWrapper) else gm  # type: ignore[no-any-return]


def autograd_key(gm: Any, fake_inputs: list[Any], aot_config: Any) -> str:
    """A hash of everything that AOTAutograd's result for `gm` depends on.

    Raises NotCacheableError for a graph whose result may differ between processes although
    everything that can be hashed is equal.
    """
    graph = graph_module_of(gm)
    if any(isinstance(x, torch.Tensor) and x.is_nested for x in fake_inputs):
        raise NotCacheableError("nested inputs, which PyTorch cannot hash")
    with (
        autograd_cache.sanitize_gm_for_cache(graph),
        inductor_config.patch(fx_graph_cache=True, freezing=False),
    ):
        try:
            autograd_cache.check_cacheable(graph)
            for module in graph.modules():
                _check_no_custom_operator(module)
            details = _KeyDetails(graph, fake_inputs, aot_config, {})  # type: ignore[arg-type]
            details.shared_memory = _shared_memory(fake_inputs)
            return autograd_cache.AOTAutogradCachePickler(graph).get_hash(details)
        except Exception as error:  # PyTorch's own cache treats every failure as a bypass
            raise NotCacheableError(str(error) or type(error).__name__) from error


def _shared_memory(fake_inputs: list[Any]) -> list[str]:
    """Where those inputs that share memory lie in it, and which tensor they are views of.

    AOTAutograd compiles inputs that share memory and are written as views of one input. PyTorch's
    hash covers each input alone.
    """

    def place(position: int) -> str:
        value = fake_inputs[position]
        base = value._base
        of = "" if base is None else f"{base.dtype} {tuple(base.shape)} {base.stride()}"
        size = value.untyped_storage().nbytes()
        return f"{position} of {size} at {value.storage_offset()} {of}"

    return ["; ".join(map(place, group)) for group in sharing_inputs(fake_inputs)]


def _check_no_custom_operator(module: torch.nn.Module) -> None:
    for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
        target = node.target
        if not isinstance(target, (OpOverload, OpOverloadPacket)):
            continue
        name = target.name() if isinstance(target, OpOverload) else str(target)
        if name.replace(".", "::").split("::")[0] not in ("aten", "prims"):
            raise NotCacheableError(
                f"custom operator {name}: its decomposition and gradient may change unnoticed"
            )
