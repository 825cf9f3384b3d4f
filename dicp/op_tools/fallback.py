"""OpFallback: operators on the CPU, their results back on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dicp.compare import significant_strides
from dicp.op_tools import trees
from dicp.op_tools.frame import Call, Feature, Proceed
from dicp.op_tools.names import RESHAPES_IN_PLACE, short_name
from dicp.op_tools.overwriting import StandIns
from dicp.op_tools.reference import CPU, autocast_of, autocast_on, expected, moved
from dicp.op_tools.tables import argument_table, labelled_arguments, labelled_result
from dicp.op_tools.timing import device_of

_MOVES = frozenset("to cpu cuda type type_as pin_memory".split())
"""What puts a tensor on a device of the program's choice."""

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class OpFallback(Feature):
    """Runs operators on the CPU. Autograd goes through; what they overwrite is overwritten on the
    device; a dtype that the CPU's kernel does not take is widened and cast back. Views stay on the
    device, so that they show its memory; meta tensors have no values to compute with."""

    feature = "fallback"
    hook = "OpFallbackHook"
    variable = "FALLBACK"
    changes_results = True

    def skips(self, name: str) -> bool:
        short = short_name(name)
        return "torch.distributed." in name or short in _MOVES or short in RESHAPES_IN_PLACE

    def around(self, call: Call, proceed: Proceed) -> Any:
        device = _device(call)
        if any(t.is_meta for t in trees.tensors((call.args, call.kwargs))):
            return proceed(call)
        original = call.args, dict(call.kwargs)
        promised = expected(call.func, *original) if device.type != "cpu" else None
        copies: dict[int, torch.Tensor] = {}
        back: dict[torch.dtype, torch.dtype] = {}

        def copied(value: torch.Tensor) -> torch.Tensor:
            return copies.setdefault(id(value), value.to(CPU))

        call.args, call.kwargs = inputs = moved(*original, CPU, copied, _generator_on_cpu)
        stand_ins = _stand_ins(original, copies)
        autocast = autocast_of(*original)

        def computed() -> Any:
            with autocast_on(CPU, autocast):
                return proceed(call)

        try:
            result = computed()
        except (RuntimeError, TypeError) as error:
            if "not implemented for" not in str(error) and "not supported" not in str(error):
                raise
            call.args, call.kwargs = inputs = _widened(inputs, copies, back)
            stand_ins = _stand_ins(original, copies)
            result = computed()
        call.args, call.kwargs = original
        if stand_ins.shown_by(result):  # on the device it is a view too
            call.args, call.kwargs = original
            return call.func(*call.args, **call.kwargs)
        originals = stand_ins.write_back(call.name, *original)
        on_device = _moved_back(result, device, originals, back, promised)
        if not self.quiet:
            self._print(call, inputs, result, on_device, back)
        return on_device

    def _print(
        self, call: Call, inputs: Any, result: Any, moved: Any, back: dict[Any, Any]
    ) -> None:
        if self.style == "line":
            self.say(f"{self.hook}: {call.name} on the CPU")
            return
        rows = [
            *labelled_arguments(call.args, call.kwargs, f"{call.name} input(device)"),
            *labelled_arguments(inputs[0], inputs[1], f"{call.name} input(cpu)"),
            *labelled_result(moved, f"{call.name} output(device)"),
            *labelled_result(result, f"{call.name} output(cpu)"),
        ]
        shown = "{" + ", ".join(f"{a}: {b}" for a, b in back.items()) + "}"
        self.say(call.heading(f"dtype_convert_back_dict:{shown}"))
        self.say(argument_table(rows))


def _stand_ins(given: Any, copies: Mapping[int, torch.Tensor]) -> StandIns:
    return StandIns.around({id(t): (t, copies[id(t)]) for t in trees.tensors(given)})


def _moved_back(
    result: Any, device: torch.device, originals: Mapping[int, torch.Tensor],
    back: Mapping[torch.dtype, torch.dtype], promised: Any,
) -> Any:  # fmt: skip
    layouts = iter(list(trees.tensors(promised)))

    def leaf(value: torch.Tensor) -> torch.Tensor:
        promise = next(layouts, None)
        if id(value) in originals:
            return originals[id(value)]
        dtype = back.get(value.dtype, value.dtype)
        if value.is_leaf and value.requires_grad and value.device != device:  # made by the program
            return _restrided(value.detach().to(device, dtype), promise).requires_grad_()
        return _restrided(value.to(device, dtype), promise)

    return trees.map_tensors(result, leaf)


def _device(call: Call) -> torch.device:
    """Where the results belong: on the inputs' device, or the one that the call names."""
    named = call.kwargs.get("device")
    return torch.device(named) if named is not None else device_of((call.args, call.kwargs))


def _generator_on_cpu(value: Any) -> Any:
    """For a generator of the device, one of the CPU; its seed is drawn from the device's."""
    if not isinstance(value, torch.Generator) or value.device.type == "cpu":
        return value
    seed = torch.randint(0, 2**62, (), generator=value, device=value.device)
    return torch.Generator().manual_seed(int(seed.item()))


def _widened(
    inputs: Any, copies: dict[int, torch.Tensor], back: dict[torch.dtype, torch.dtype]
) -> Any:
    """The inputs in a dtype that the CPU's kernels take."""

    def leaf(value: torch.Tensor) -> torch.Tensor:
        wide = _WIDER.get(value.dtype)
        if wide is None:
            return value
        back.setdefault(wide, value.dtype)
        return value.to(wide)

    widened = trees.map_tensors(inputs, leaf)
    pairs = zip(trees.tensors(inputs), trees.tensors(widened), strict=True)
    changed = {id(before): after for before, after in pairs}
    for key, copy in copies.items():
        copies[key] = changed.get(id(copy), copy)
    return widened


def _restrided(value: torch.Tensor, promise: torch.Tensor | None) -> torch.Tensor:
    """The values with the strides that the device's own operator gives."""
    if promise is None or promise.shape != value.shape or value.layout != torch.strided:
        return value
    if significant_strides(value) == significant_strides(promise):
        return value
    if any(stride == 0 for stride in promise.stride()):
        return value
    empty = torch.empty_strided(
        value.shape, promise.stride(), dtype=value.dtype, device=value.device
    )
    return empty.copy_(value)
