"""AOTAutograd's results on disk: which graphs run, and the wrappers of inputs and outputs.

Results are signed with the user's secret and stored under a key that includes the backend's
identity. A process that finds one traces and compiles nothing.
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from dicp.cache import Entry, key_of
from dicp.dynamo_bridge.aot_graph import CompiledGraph, GraphCompiler, OtherLinesError
from dicp.dynamo_bridge.graph_cache import variants
from dicp.errors import CacheWarning
from dicp.torch_private import (
    BoxedBool,
    NewGuards,
    NotCacheableError,
    autograd_key,
    backed_symints,
    disable_current_modes,
    free_symbols,
    guards_hold,
    guards_on,
    is_plain_symbol,
    overwritten_inputs,
    ranges_of,
    storable_result,
)

_CACHE_KIND: Final = "aot"
_FORMAT: Final = 3


@dataclass(frozen=True, eq=False)
class ResultLookup:
    """Where this compilation's result is stored (no key: nowhere), or the result found there.

    writes: whether the graph of the result changes the data of an input.
    """

    key: str = ""
    symints: tuple[torch.SymInt, ...] = ()
    loaded: Any = None
    writes: bool = False
    guards: NewGuards = field(default_factory=NewGuards)


def find_result(
    compiler: GraphCompiler, gm: Any, fake_inputs: list[Any], aot_config: Any
) -> ResultLookup:
    """Looks the graph up among the stored results; a damaged entry raises nothing."""
    if compiler.result_cache is None:
        compiler.on_cache("off", "no cache")
        return ResultLookup()
    try:
        symints = tuple(_all_symints(fake_inputs))
        ranges = ranges_of(symints)
        base = key_of(_FORMAT, autograd_key(gm, fake_inputs, aot_config), ranges, compiler.identity)
    except NotCacheableError as error:
        compiler.on_cache("bypass", str(error))
        return ResultLookup()
    new_guards = NewGuards(symints)
    for key, entry in variants(compiler.result_cache, _CACHE_KIND, base):
        lookup = ResultLookup(key, symints, guards=new_guards)
        if entry is None:
            break
        try:
            guards = entry.read("guards").decode()
            if guards and not guards_hold(guards, list(symints)):
                continue
            loaded = _load(compiler, entry, fake_inputs, aot_config)
            writes = bool(entry.read("writes"))
        except OtherLinesError:
            continue
        except Exception as error:  # a damaged entry is compiled again
            compiler.on_cache("damaged", f"{type(error).__name__}: {error}")
            warnings.warn(
                f"a stored compilation result could not be loaded and is rebuilt ({error})",
                CacheWarning,
                stacklevel=2,
            )
            return lookup
        compiler.on_cache("hit", "")
        return replace(lookup, loaded=loaded, writes=writes)
    compiler.on_cache("miss", "")
    return lookup


def _all_symints(fake_inputs: list[Any]) -> list[torch.SymInt]:
    """The symbolic sizes among the inputs; guards on any other symbol could not be stored."""
    symints = backed_symints(fake_inputs)
    plain = [symint for symint in symints if is_plain_symbol(symint)]
    known = {symbol for symint in plain for symbol in free_symbols(symint)}
    for value in fake_inputs:
        if isinstance(value, (torch.Tensor, torch.SymInt)):
            unknown = free_symbols(value) - known
            if unknown:
                raise NotCacheableError(f"sizes {unknown} are not inputs themselves")
    return symints


def _load(compiler: GraphCompiler, entry: Entry, fake_inputs: list[Any], aot_config: Any) -> Any:
    # The cache has verified the entry against the user's secret: no other user wrote this pickle.
    result = pickle.loads(entry.read("result"))
    settings = {
        "cudagraphs": BoxedBool(False),
        "boxed_forward_device_index": None,
        "compile_region_name": None,
        "load_graph": compiler.load_graph,
    }
    return result.wrap_post_compile(fake_inputs, aot_config, settings)


def store_result(
    compiler: GraphCompiler,
    lookup: ResultLookup,
    metadata: Any,
    made: list[CompiledGraph],
    reason: str = "",
    **parts: Any,
) -> None:
    """Stores AOTAutograd's result, or reports why not: for `reason`, or another one.

    A failure loses only the cache entry.
    """
    if compiler.result_cache is None or not lookup.key:
        return
    if metadata.tokens:
        reason = "operators with side effects are ordered by tokens, which are not restored"
    elif any(graph.artifact_json is None for graph in made):
        reason = "a compiled graph has no stored form"
    elif not lookup.guards.only_on_symints():
        reason = "a number of the caller's, such as a float, became a constant"
    if reason:
        compiler.on_cache("bypass", reason)
        return
    try:
        guards = guards_on(list(lookup.symints))
        result = storable_result(runtime_metadata=metadata, guards_expr=guards or None, **parts)
        with disable_current_modes():
            content = pickle.dumps(result)
    except Exception as error:  # pickling runs arbitrary __reduce__ methods
        compiler.on_cache("bypass", f"no stored form: {error}")
        return
    writes = b"1" if overwritten_inputs(metadata) else b""
    files = {"result": content, "guards": guards.encode(), "writes": writes}
    compiler.result_cache.put(_CACHE_KIND, lookup.key, files)
    compiler.on_cache("stored", "")
