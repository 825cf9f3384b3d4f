"""Values of arguments and results as JSON, with their tensors beside it: no code, no pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dicp.conformance.suite.case import Operand, span
from dicp.op_tools.cases import NAMED, NotStorableError, plain_form


@dataclass
class Encoder:
    """Turns values into JSON; `tensors` collects what belongs into the safetensors file."""

    prefix: str
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self, value: Any) -> Any:
        """Raises NotStorableError."""
        if isinstance(value, Operand):
            assert value.value is not None, "only drawn cases are stored"
            return {**self.encode(value.value), "gen": value.gen, "grad": value.grad}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, list):
            return [self.encode(part) for part in value]
        if isinstance(value, tuple):
            return {"tuple": [self.encode(part) for part in value]}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": {key: self.encode(part) for key, part in value.items()}}
        return plain_form(value)

    def _tensor(self, value: Tensor) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_quantized:
            raise NotStorableError(f"a tensor of layout {value.layout}")
        value = value.detach().resolve_conj().resolve_neg()
        strides = value.stride()
        flat = value.as_strided((span(value.shape, strides),), (1,), value.storage_offset())
        name = f"{self.prefix}.{len(self.tensors)}"
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        self.tensors[name] = flat.clone().contiguous().cpu()
        dtype = str(value.dtype).removeprefix("torch.")
        form: dict[str, Any] = {"tensor": name, "dtype": dtype, "shape": list(value.shape)}
        return form if value.is_contiguous() else {**form, "strides": list(strides)}


@dataclass(frozen=True)
class Decoder:
    """Turns JSON back into values; `tensors` are those of the safetensors file."""

    tensors: Mapping[str, Tensor]

    def decode(self, form: Any, operands: bool = False) -> Any:
        """The value; operands: its tensors as operands of a case."""
        if isinstance(form, list):
            return [self.decode(part, operands) for part in form]
        if not isinstance(form, dict):
            return form
        if "tensor" in form:
            return self._operand(form) if operands else self._tensor(form)
        ((kind, given),) = form.items()
        if kind in NAMED:
            return getattr(torch, given)
        of_parts: Mapping[str, Callable[[], Any]] = {
            "tuple": lambda: tuple(self.decode(given, operands)),
            "dict": lambda: {key: self.decode(part, operands) for key, part in given.items()},
            "slice": lambda: slice(*self.decode(given)),
            "complex": lambda: complex(*self.decode(given)),
            "float": lambda: float(given),
            "ellipsis": lambda: Ellipsis,
            "none": lambda: None,
            "device": lambda: torch.device(given),
        }
        return of_parts[kind]()

    def _tensor(self, form: Mapping[str, Any]) -> Tensor:
        flat, shape = self.tensors[form["tensor"]], form["shape"]
        dtype: torch.dtype = getattr(torch, form["dtype"])
        flat = torch.view_as_complex(flat) if dtype.is_complex else flat
        if "strides" not in form:
            return flat.view(shape)
        return flat.as_strided(shape, form["strides"])

    def _operand(self, form: Mapping[str, Any]) -> Operand:
        strides = tuple(form["strides"]) if "strides" in form else None
        return Operand(tuple(form["shape"]), form["dtype"], strides, form["gen"], form["grad"],
                       self._tensor(form))  # fmt: skip
