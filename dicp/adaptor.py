"""The adaptor file of a chip that lacks dtypes or layouts: what operators are converted to.

`convert_config.yaml` is a list of entries, `common_config` and operators by DIOPI's or ATen's name.
Of three levels (common, operator, argument) the deeper wins, for each dtype on its own. The file is
data: parsed by YAML's safe loader, checked as a whole when it is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from dicp.config import Config
from dicp.dtypes import REDUCED_FLOATS
from dicp.errors import AdaptorFileError
from dicp.errors.text import did_you_mean, nearest
from dicp.torch_private import overload_name, overloads_of, schema_of

T = TypeVar("T")
V = TypeVar("V")
FILE: Final = "convert_config.yaml"
COMMON: Final = "common_config"
LAYOUTS: Final = ("NCHW", "NHWC", "ND")
Dtypes = Mapping[torch.dtype, torch.dtype]

DIOPI: Final = {
    "batch_norm": ("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
                   "native_batch_norm"),
    "convolution2d": ("convolution",), "convolution3d": ("convolution",),
    "group_norm": ("native_group_norm",), "layer_norm": ("native_layer_norm",),
    "log_softmax": ("_log_softmax",), "softmax": ("_softmax",), "matmul": ("mm", "bmm"),
}  # fmt: skip
"""DIOPI's operator -> ATen's name, where that is not the same name in lower case."""
ALIASES: Final = {"input": "self"}
"""DIOPI's argument -> ATen's name."""
_CAST: Final = re.compile(r"\(([^()]*)\)\s*->\s*(\w+)")
_LAYOUT: Final = re.compile(r"(\w+)(?:\((\w+)\))?")


@dataclass(frozen=True)
class Level:
    """One entry's statements; None and absent: those of the level above."""

    dtypes: Dtypes = field(default_factory=dict)
    arguments: Mapping[str, Dtypes] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Argument -> conversion; "" stands for all other arguments."""
    contiguous: bool | None = None
    allow_narrowing: bool | None = None


@dataclass(frozen=True)
class Conversions:
    """The conversions of one operator: its entry's, then the common ones."""

    levels: tuple[Level, ...]

    def dtype(self, argument: str, given: torch.dtype) -> torch.dtype:
        """What an argument of this dtype is cast to; the dtype itself if it is not."""
        tables = [level.arguments.get(argument, {}) for level in self.levels]
        tables += [level.dtypes for level in self.levels]
        return next((table[given] for table in tables if given in table), given)

    def layout(self, argument: str) -> str:
        """NCHW (row-major), NHWC (channels-last), or ND: as it is."""
        for level in self.levels:
            if argument in level.layouts or "" in level.layouts:
                return level.layouts.get(argument) or level.layouts[""]
            if level.contiguous is not None:
                return "NCHW" if level.contiguous else "ND"
        return "NCHW"

    @property
    def allow_narrowing(self) -> bool:
        return next((v for v in (x.allow_narrowing for x in self.levels) if v is not None), False)


@dataclass(frozen=True)
class Adaptor:
    """A parsed adaptor file: the common level, and operators' levels by their name in ATen."""

    common: Level = field(default_factory=Level)
    operators: Mapping[str, Level] = field(default_factory=dict)

    def conversions(self, name: str, overload: str, scalar: bool) -> Conversions:
        """The conversions of one overload; `scalar`: its second operand is a number."""
        keys = [f"{name}.{overload}", *([f"{name}:Scalar"] if scalar else []), name]
        own = [self.operators[key] for key in keys if key in self.operators]
        return Conversions((*own, self.common))


def adaptor_text(target: object, config: Config) -> str:
    """The text of the adaptor file that applies to a target; empty where there is none."""
    path = _path(target, config)
    return "" if path is None else path.read_text("utf-8")


def find_adaptor(
    target: object, config: Config, dtypes: frozenset[torch.dtype] | None = None
) -> Adaptor | None:
    """The adaptor that applies to a target: that of `config`, else the one that it ships.

    dtypes: those that the target computes in, for a check of the casts.

    Raises AdaptorFileError.
    """
    path = _path(target, config)
    if path is None:
        return None
    half = config.precision == "half"
    return read_adaptor(path, path.read_text("utf-8"), half, dtypes)


def _path(target: object, config: Config) -> Path | None:
    if config.convert_config is not None:
        if not config.convert_config.is_file():
            raise AdaptorFileError(config.convert_config, 0, "there is no such file")
        return config.convert_config
    file = getattr(sys.modules[type(target).__module__], "__file__", None)
    path = Path(file or "").parent / FILE
    return path if file and path.is_file() else None


@lru_cache(maxsize=8)
def read_adaptor(
    path: Path, text: str, half: bool = False, dtypes: frozenset[torch.dtype] | None = None
) -> Adaptor:
    """The adaptor that a file's text states.

    half: float32 may be computed in 16 bits.
    dtypes: as for `find_adaptor`.

    Raises AdaptorFileError with the line of what is wrong.
    """
    import yaml  # few chips have such a file

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise AdaptorFileError(path, mark.line + 1 if mark else 1, problem) from error
    return Adaptor() if root is None else _Reader(path, half, dtypes).adaptor(root)


@cache
def _tensor_arguments() -> Mapping[str, frozenset[str]]:
    """By operator of ATen, the names of the arguments that are tensors in some overload."""
    found: dict[str, set[str]] = {}
    for op in overloads_of("aten"):
        schema = schema_of(op)
        name = schema.name.split("::")[1]
        tensors = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
        for key in (name, f"{name}.{overload_name(op)}"):
            found.setdefault(key, set()).update(tensors)
    return {name: frozenset(arguments) for name, arguments in found.items()}


def _worded(name: object) -> str:
    return str(name).removeprefix("torch.") or "all arguments"


class _Reader:
    """Converts YAML's nodes, which know their lines, to levels."""

    def __init__(self, path: Path, half: bool, dtypes: frozenset[torch.dtype] | None) -> None:
        self.path, self.half, self.dtypes = path, half, dtypes

    def fail(self, node: Any, problem: str) -> AdaptorFileError:
        return AdaptorFileError(self.path, node.start_mark.line + 1, problem)

    def adaptor(self, root: Any) -> Adaptor:
        if root.id != "sequence":
            raise self.fail(root, "expected a list of entries such as `- common_config:`")
        operators: dict[str, Level] = {}
        for entry in root.value:
            for key, value in self.pairs(entry):
                if key.value == COMMON:
                    self.state(operators, COMMON, self.level(value, None), key)
                    continue
                names = self.operators(key)
                arguments = frozenset[str]().union(
                    *(_tensor_arguments()[name.partition(":")[0]] for name in names)
                )
                level = self.level(value, arguments)
                for name in names:
                    self.state(operators, name, level, key)
        return Adaptor(operators.pop(COMMON, Level()), operators)

    def state(self, table: dict[T, V], name: T, value: V, node: Any) -> None:
        """Add a statement; one that contradicts an earlier one is an error."""
        if table.setdefault(name, value) != value:
            raise self.fail(node, f"it contradicts what the file says of {_worded(name)} before")

    def pairs(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.id != "mapping":
            raise self.fail(node, "expected `name: value`")
        names = set()
        for key, value in node.value:
            if key.value in names:
                raise self.fail(key, f"{key.value!r} is here a second time")
            names.add(key.value)
            yield key, value

    def operators(self, key: Any) -> list[str]:
        """The names in ATen of an entry's operator; `:Scalar` is appended for numbers alone."""
        known, name = _tensor_arguments(), key.value.removeprefix("aten.")
        if name.startswith("diopi"):
            base = re.sub(r"Inp$", "", name.removeprefix("diopi").removesuffix("Scalar"))
            snake = re.sub(r"(?<!^)(?=[A-Z])", "_", base).lower()
            only = ":Scalar" if name.endswith("Scalar") else ""
            names = [f"{aten}{only}" for aten in DIOPI.get(snake, (snake,)) if aten in known]
        else:
            names = [name] if name in known else []
        if not names:
            near = did_you_mean(nearest(name, list(known)))
            raise self.fail(key, f"unknown operator {key.value!r}.{near}".rstrip("."))
        return names

    def level(self, node: Any, arguments: frozenset[str] | None) -> Level:
        """One entry; `arguments` are those of its operator, None for the common entry."""
        stated: dict[str, Any] = {}
        for key, value in self.pairs(node):
            match key.value:
                case "dtype":
                    stated["dtypes"] = self.casts(value)
                case "tensor_dtype" if arguments is not None:
                    stated["arguments"] = {
                        self.argument(name, name.value, arguments): self.casts(casts)
                        for name, casts in self.pairs(value)
                    }
                case "layout":
                    stated["layouts"] = self.layouts(value, arguments)
                case "contiguous" | "allow_narrowing":
                    stated[key.value] = self.boolean(value)
                case _:
                    raise self.fail(key, f"unknown key {key.value!r}")
        return Level(**stated)

    def argument(self, node: Any, name: str, arguments: frozenset[str] | None) -> str:
        found = ALIASES.get(name, name)
        if arguments is None or found not in arguments:
            have = ", ".join(sorted(arguments or ())) or "none"
            raise self.fail(node, f"unknown argument {name!r}; the tensor arguments are {have}")
        return found

    def casts(self, node: Any) -> Dtypes:
        found: dict[torch.dtype, torch.dtype] = {}
        text = node.value if node.id == "scalar" else ""
        if not text or re.sub(r"[\s,]", "", _CAST.sub("", text)):
            raise self.fail(node, "expected casts such as `(int64)->int32, (float64)->float32`")
        for sources, target in _CAST.findall(text):
            to = self.dtype(node, target)
            for source in sources.split(","):
                given = self.dtype(node, source.strip())
                if to in REDUCED_FLOATS and given not in REDUCED_FLOATS and not self.half:
                    raise self.fail(node, f"{source.strip()} to {target} needs precision='half'")
                same_kind = given.is_complex or not to.is_complex
                if to != given and self.dtypes and not (same_kind and to.to_real() in self.dtypes):
                    raise self.fail(
                        node, f"the target does not compute {source.strip()} in {target}"
                    )
                self.state(found, given, to, node)
        return found

    def dtype(self, node: Any, name: str) -> torch.dtype:
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise self.fail(node, f"unknown dtype {name!r}")
        return found

    def layouts(self, node: Any, arguments: frozenset[str] | None) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for part in str(node.value).split(","):
            match = _LAYOUT.fullmatch(part.strip())
            name, inner = match.groups() if match else ("", None)
            argument = self.argument(node, name, arguments) if inner else ""
            if (layout := inner or name) not in LAYOUTS:
                raise self.fail(node, f"unknown layout {part.strip()!r}; known: {LAYOUTS}")
            self.state(found, argument, layout, node)
        return found

    def boolean(self, node: Any) -> bool:
        if str(node.value).lower() not in ("true", "false"):
            raise self.fail(node, "expected True or False")
        return str(node.value).lower() == "true"
