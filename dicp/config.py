"""The settings of dicp: one frozen, documented value, passed explicitly.

This module alone reads the process environment. `OPTIONS` is the one table behind
`Config.from_env`, `torch.compile(options=...)`, `python -m dicp config` and the README.
An environment variable that is set but empty counts as unset.
"""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import platformdirs

from dicp.errors import ConfigValueError, DicpWarning, UnknownOptionError

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "on", "yes"), True),
    **dict.fromkeys(("0", "false", "off", "no"), False),
}


class _Invalid(Exception):
    """A value that its kind rejects; `Option.parse`, which knows its source, raises the error."""


@dataclass(frozen=True)
class Kind:
    """A type of value: its name, what it accepts in words, and the parser for text and values."""

    name: str
    expected: str
    fix: str
    parse: Callable[[Any], Any]


@dataclass(frozen=True)
class Option:
    """One row of the table of settings."""

    name: str
    kind: Kind
    environment: tuple[str, ...]
    default: Any
    meaning: str
    changes_code: bool

    def parse(self, value: object, source: str) -> Any:
        """`value` as this option's type. Raises ConfigValueError naming `source`."""
        try:
            return self.kind.parse(value)
        except _Invalid:
            raise ConfigValueError(source, value, self.kind.expected, self.kind.fix) from None


def _parse_boolean(value: Any) -> bool:
    parsed = _BOOLEANS.get(str(value).strip().lower())
    if parsed is None:
        raise _Invalid
    return parsed


def _parse_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _Invalid
    try:
        count = int(value)
    except ValueError:
        raise _Invalid from None
    if count < 0:
        raise _Invalid
    return count


def _parse_path(value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise _Invalid
    try:
        return Path(value).expanduser().absolute()
    except (RuntimeError, TypeError, ValueError):  # no home folder, or bytes
        raise _Invalid from None


def _parse_optional_path(value: Any) -> Path | None:
    return None if value is None else _parse_path(value)


def _parse_words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError:  # an open quotation
            raise _Invalid from None
    if not isinstance(value, Sequence) or not all(isinstance(word, str) for word in value):
        raise _Invalid
    return tuple(value)


def _parse_sizes(value: Any) -> tuple[int, ...]:
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(words, Sequence):
        raise _Invalid
    sizes = tuple(_parse_count(word) for word in words)
    if list(sizes) != sorted(set(sizes)) or 0 in sizes:
        raise _Invalid
    return sizes


def _parse_patterns(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise _Invalid
    patterns = tuple(word.strip() for word in words if word.strip())
    try:
        for pattern in patterns:
            re.compile(pattern)
    except re.error:
        raise _Invalid from None
    return patterns


def _parse_name(value: Any) -> str:
    if not isinstance(value, str) or len(value.split()) > 1:
        raise _Invalid
    return value.strip()


def _parse_command(value: Any) -> str:
    if not isinstance(value, str):
        raise _Invalid
    _parse_words(value)
    return value.strip()


BOOLEAN = Kind(
    "bool",
    "one of 1, true, on, yes, 0, false, off, no",
    "Use 1 to switch it on and 0 to switch it off.",
    _parse_boolean,
)
COUNT = Kind("int", "a whole number, 0 or more", "Give it in digits.", _parse_count)
PATH = Kind("path", "the path of a folder", "Give a path, such as ~/.cache/dicp.", _parse_path)
OPTIONAL_PATH = Kind(
    "path",
    "the path of a folder, or nothing",
    "Give a path, or leave it unset.",
    _parse_optional_path,
)
COMMAND = Kind(
    "command",
    "the command of a compiler, such as 'g++-13' or 'ccache g++'",
    "Give it as in a shell, with every quotation closed.",
    _parse_command,
)
SIZES = Kind(
    "sizes",
    "sizes in rising order, such as '128 256 512'",
    "Give one text with spaces between, or a list of numbers.",
    _parse_sizes,
)
NAME = Kind("name", "the name of an installed target", "Give one word.", _parse_name)
OPERATORS = Kind(
    "operators",
    "regular expressions of operator names with commas between, such as 'conv2d,add.out'",
    "Give one text, or a list of texts.",
    _parse_patterns,
)
WORDS = Kind(
    "flags",
    "compiler flags, such as '-O2 -g'",
    "Give one text as in a shell, with every quotation closed, or a list of texts.",
    _parse_words,
)


def _choice(*values: str) -> Kind:
    def parse(value: Any) -> str:
        if value not in values:
            raise _Invalid
        return str(value)

    listed = " or ".join((", ".join(map(repr, values[:-1])), repr(values[-1])))
    return Kind("|".join(values), listed, "Choose one of these.", parse)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set `variables` in the process environment, for a library that reads it when imported."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def environment_with(**variables: str) -> dict[str, str]:
    """The environment for a child process: this one's, changed by `variables`."""
    return {**os.environ, **variables}


def is_set(variable: str) -> bool:
    """Whether an environment variable has a value."""
    return bool(os.environ.get(variable))


def default_cache_dir() -> Path:
    """The user's cache folder for dicp, at the operating system's standard place."""
    return platformdirs.user_cache_path("dicp", appauthor=False)


def _setting(
    kind: Kind,
    environment: str,
    meaning: str,
    *,
    default: object = MISSING,
    factory: Callable[[], Any] | None = None,
    default_text: str = "",
    changes_code: bool = False,
) -> Any:
    metadata = {
        "kind": kind,
        "environment": tuple(environment.split()),
        "meaning": meaning,
        "default_text": default_text or _as_text(default),
        "changes_code": changes_code,
    }
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None or value == () else str(value)


PREFERRED_NATIVE = "DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS"
"""The variable of older scripts for `native_ops`: a preference, whose breach is a warning."""


@dataclass(frozen=True)
class Config:
    """All settings of one compilation. Values are checked and normalized on construction."""

    cache_dir: Path = _setting(
        PATH,
        "DICP_CACHE_DIR",
        "folder in which the disk cache makes one of its own, private to the user",
        factory=default_cache_dir,
        default_text="the user's cache folder",
    )
    cache: bool = _setting(
        BOOLEAN, "DICP_CACHE", "keep compiled results on disk between processes", default=True
    )
    cache_size_mb: int = _setting(
        COUNT,
        "DICP_CACHE_SIZE_MB",
        "least recently used entries go when the cache is larger than this",
        default=4096,
    )
    dump: Path | None = _setting(
        OPTIONAL_PATH,
        "DICP_DUMP",
        "folder for the graph after each stage, the program and the generated source",
        default=None,
    )
    dump_times: bool = _setting(
        BOOLEAN,
        "DICP_DUMP_TIMES",
        "with dump: time every kernel and call at a graph's first run, which is repeated for it on "
        "copies of what it overwrites",
        default=False,
    )
    timings: bool = _setting(
        BOOLEAN, "DICP_TIMINGS", "report the seconds of each stage of a compilation", default=False
    )
    fallback: Literal["auto", "error"] = _setting(
        _choice("auto", "error"),
        "DICP_FALLBACK",
        "an operator the target does not compile runs eagerly, or is an error",
        default="auto",
        changes_code=True,
    )
    on_compile_error: Literal["raise", "eager"] = _setting(
        _choice("raise", "eager"),
        "DICP_ON_COMPILE_ERROR",
        "a failed compilation raises, or runs the graph eagerly with one warning",
        default="raise",
    )
    eager_ops: tuple[str, ...] = _setting(
        OPERATORS,
        "DICP_EAGER_OPS DIPU_FORCE_FALLBACK_OPS_LIST",
        "operators that stay eager calls: regular expressions of names such as conv2d, add.out",
        default=(),
        changes_code=True,
    )
    native_ops: tuple[str, ...] = _setting(
        OPERATORS,
        f"DICP_NATIVE_OPS {PREFERRED_NATIVE}",
        "operators that may be neither left to eager nor decomposed, else it is an error "
        f"({PREFERRED_NATIVE}: a warning)",
        default=(),
        changes_code=True,
    )
    rejected: Literal["error", "eager"] = _setting(
        _choice("error", "eager"),
        "DICP_REJECTED",
        "an operator that the vendor's graph compiler refuses is an error, or runs eagerly",
        default="error",
        changes_code=True,
    )
    precision: Literal["keep", "fast", "half"] = _setting(
        _choice("keep", "fast", "half"),
        "DICP_PRECISION",
        "keep: float32 is computed as such; fast: the vendor may multiply it in reduced precision "
        "(TF32, bf16); half: it may compute it in 16 bits",
        default="keep",
        changes_code=True,
    )
    runs_on: Literal["auto", "device", "simulator"] = _setting(
        _choice("auto", "device", "simulator"),
        "DICP_RUNS_ON",
        "run on the device, on the target's simulator, or on whichever is there",
        default="auto",
        changes_code=True,
    )
    cxx: str = _setting(
        COMMAND,
        "DICP_CXX CXX",
        "C++ compiler; empty: the first of g++, clang++ that is found",
        default="",
        changes_code=True,
    )
    cxx_flags: tuple[str, ...] = _setting(
        WORDS,
        "DICP_CXX_FLAGS",
        "flags added after dicp's own when generated C++ is compiled",
        default=(),
        changes_code=True,
    )
    compile_jobs: int = _setting(
        COUNT,
        "DICP_COMPILE_JOBS",
        "compilers run side by side; 0: one per processor",
        default=0,
    )
    fuse: bool = _setting(
        BOOLEAN,
        "DICP_FUSE",
        "fuse subgraphs such as attention and norms",
        default=True,
        changes_code=True,
    )
    layout: bool = _setting(
        BOOLEAN,
        "DICP_LAYOUT",
        "choose memory formats per operator, such as channels-last convolutions",
        default=True,
        changes_code=True,
    )
    gears: tuple[int, ...] = _setting(
        SIZES,
        "DICP_GEARS",
        "sizes that symbolic dimensions are padded up to, where that changes no result: one static "
        "graph for each; empty: dimensions stay dynamic",
        default=(),
        changes_code=True,
    )
    fallback_random: bool = _setting(
        BOOLEAN,
        "DICP_FALLBACK_RANDOM",
        "draw random numbers with the eager operators, bit for bit",
        default=False,
        changes_code=True,
    )
    freeze: bool = _setting(
        BOOLEAN,
        "DICP_FREEZE",
        "inference only: treat parameters as constants and fold them",
        default=False,
        changes_code=True,
    )
    check_bounds: bool = _setting(
        BOOLEAN,
        "DICP_CHECK_BOUNDS",
        "indices from tensors are checked; off: an index out of range is undefined behaviour",
        default=True,
        changes_code=True,
    )
    rnn: bool = _setting(
        BOOLEAN,
        "DICP_RNN",
        "trace nn.LSTM, nn.GRU and nn.RNN, which Dynamo leaves to eager: sets "
        "torch._dynamo.config.allow_rnn for the process",
        default=False,
    )
    target: str = _setting(
        NAME,
        "DICP_TARGET",
        "the target that backend='dicp' compiles for; empty: the one of highest priority for the "
        "inputs' device",
        default="",
        changes_code=False,
    )
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        _setting(
            _choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            "DICP_MODE",
            "as torch.compile's mode",
            default="default",
            changes_code=True,
        )
    )

    native_ops_preferred: bool = False
    """Whether `native_ops` comes from a variable that states a preference: see there."""
    vendor: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of the options that the target itself has, by name."""

    def __post_init__(self) -> None:
        for option in OPTIONS:
            value = option.parse(getattr(self, option.name), f"option {option.name!r}")
            object.__setattr__(self, option.name, value)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, vendor: Sequence[Option] = ()
    ) -> Config:
        """The defaults, changed by the environment variables of the table.

        `vendor` are the options of the target that is compiled for. Raises ConfigValueError; an
        unknown DICP_ variable is a DicpWarning.
        """
        environ = os.environ if environ is None else environ
        _warn_unknown_variables(environ, vendor)
        own = {option.name: option.default for option in vendor}
        return cls(
            **_read(OPTIONS, environ),
            native_ops_preferred=_is_preference(environ),
            vendor={**own, **_read(vendor, environ)},
        )

    def with_options(
        self,
        options: Mapping[str, object] | None = None,
        mode: str | None = None,
        vendor: Sequence[Option] = (),
    ) -> Config:
        """This config changed by torch.compile's `options` and `mode`.

        Raises UnknownOptionError and ConfigValueError.
        """
        known = {option.name: option for option in (*OPTIONS, *vendor)}
        values: dict[str, Any] = {}
        for name, value in (options or {}).items():
            if name not in known:
                raise UnknownOptionError(str(name), tuple(known))
            values[name] = known[name].parse(value, f"option {name!r}")
        if mode is not None:
            values["mode"] = _agreed_mode(known["mode"].parse(mode, "mode"), values.get("mode"))
        if "native_ops" in values:
            values["native_ops_preferred"] = False
        own = {o.name: values.pop(o.name) for o in vendor if o.name in values}
        if own:
            values["vendor"] = {**self.vendor, **own}
        return replace(self, **values) if values else self

    def key(self, vendor: Sequence[Option] = ()) -> dict[str, object]:
        """The settings that change generated code, as plain values for a cache key."""
        shared: dict[str, object] = {
            o.name: getattr(self, o.name) for o in OPTIONS if o.changes_code
        }
        shared["native_ops_preferred"] = self.native_ops_preferred
        return shared | {o.name: self.vendor.get(o.name) for o in vendor if o.changes_code}

    @property
    def cache_bytes(self) -> int:
        """The cap of the disk cache in bytes."""
        return self.cache_size_mb * 2**20

    @property
    def jobs(self) -> int:
        """How many compilers to run side by side: at least one."""
        return self.compile_jobs or _processors()


def _is_preference(environ: Mapping[str, str]) -> bool:
    """Whether `native_ops` is read from the variable that states a preference."""
    return bool(environ.get(PREFERRED_NATIVE)) and not environ.get("DICP_NATIVE_OPS")


def asked(name: str, options: Mapping[str, Any]) -> Any:
    """The value of a setting in `options` or else in the environment; None where it is in none."""
    option = next(option for option in OPTIONS if option.name == name)
    if name in options:
        return option.parse(options[name], f"option {name!r}")
    return _read([option], os.environ).get(name)


def vendor_variable(name: str) -> str:
    """An environment variable that a vendor's own tools define, such as its toolkit's location."""
    return os.environ.get(name, "")


def tool_variable(name: str) -> str:
    """A variable of the operator tools, such as OP_CAPTURE_LIST, as it is set now.

    Programs change these between two runs of one process, so they are read at every call.
    """
    return os.environ.get(name, "")


def vendor_option(
    name: str,
    kind: Kind,
    environment: str,
    meaning: str,
    *,
    default: Any,
    changes_code: bool = True,
) -> Option:
    """An option that a target adds to the table: `Target.options` lists them.

    `environment` names its variables, separated by spaces; `default` is a value of its kind.
    """
    return Option(name, kind, tuple(environment.split()), default, meaning, changes_code)


def _read(options: Sequence[Option], environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of those `options` that the environment sets."""
    values: dict[str, Any] = {}
    for option in options:
        variable = next((name for name in option.environment if environ.get(name)), None)
        if variable is not None:
            source = f"environment variable {variable}"
            values[option.name] = option.parse(environ[variable], source)
    return values


def _agreed_mode(mode: str, option: str | None) -> str:
    if option is not None and option != mode:
        raise ConfigValueError(
            "mode", mode, f"the same as option 'mode', which is {option!r}", "Give it once."
        )
    return mode


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _warn_unknown_variables(environ: Mapping[str, str], vendor: Sequence[Option]) -> None:
    known = {name for option in (*OPTIONS, *vendor) for name in option.environment}
    for name in sorted(environ):
        if name.startswith("DICP_") and name not in known:
            warnings.warn(
                f"environment variable {name} is not one that dicp reads; "
                "`python -m dicp config` lists those.",
                DicpWarning,
                stacklevel=3,
            )


def _option(setting: Field[Any]) -> Option:
    metadata = setting.metadata
    return Option(
        setting.name,
        metadata["kind"],
        metadata["environment"],
        metadata["default_text"],
        metadata["meaning"],
        metadata["changes_code"],
    )


OPTIONS: tuple[Option, ...] = tuple(_option(f) for f in fields(Config) if f.metadata)


# ---- the eager device ----------------------------------------------------------------------------

_ALGORITHMS = ("BF", "BS", "RAW", "TORCH")


@dataclass(frozen=True)
class DeviceSettings:
    """What the eager device reads from the environment, once, when it is registered.

    `fallback`, `kept` and `compared` are texts of patterns, separated by commas.
    """

    vendor: str = ""
    simulated: int = 1
    visible: tuple[int, ...] | None = None
    mock: bool = True
    show_as_mocked: bool = True
    fallback: str = ""
    kept: str = ""
    compared: str = ""
    dumps: bool = False
    """Whether DIPU_DUMP_OP_ARGS is set, so that it has to be read at every call."""
    log_fallback: bool = False
    check_device: bool = False
    synchronous: bool = False
    memory_check: bool = False
    backtraces: bool = False
    max_blocks: int = 10000
    log_interval: int = 1000
    algorithm: str = "BF"
    max_split_mb: int = 0
    collect_above: float = 0.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DeviceSettings:
        """The settings of this process. Raises ConfigValueError."""
        given = _Variables(os.environ if environ is None else environ)
        options = _allocator_options(given.text("DIPU_TORCH_ALLOCATOR_CONF"))
        visible = given.text("DIPU_VISIBLE_DEVICES")
        return cls(
            vendor=given.text("DIPU_DEVICE"),
            simulated=given.count("DIPU_SIMULATED_DEVICES", 1),
            visible=_indices("DIPU_VISIBLE_DEVICES", visible) if visible else None,
            mock=given.boolean("DIPU_MOCK_CUDA", True),
            show_as_mocked=given.boolean("DIPU_PYTHON_DEVICE_AS_CUDA", True)
            and given.boolean("DITORCH_SHOW_DEVICE_AS_CUDA", True),
            fallback=given.text("DIPU_FORCE_FALLBACK_OPS_LIST"),
            kept=given.text("DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS"),
            compared=given.text("DIPU_AUTOCOMPARE_OPS_LIST"),
            dumps=bool(given.text("DIPU_DUMP_OP_ARGS")),
            log_fallback=given.boolean("DIPU_LOG_FALLBACK_INFO", False),
            check_device=given.boolean("DIPU_CHECK_TENSOR_DEVICE", False),
            synchronous=given.boolean("DIPU_SYNC_EXEC_MODE", False),
            memory_check=given.boolean("DIPU_MEM_CHECK", False),
            backtraces=given.boolean("DIPU_MEM_CHECK_ENABLE_BACKTRACE", False),
            max_blocks=given.count("DIPU_MEM_CHECK_MAX_BLOCK", 10000),
            log_interval=given.count("DIPU_MEM_CHECK_LOG_INTERVAL", 1000),
            algorithm=given.choice("DIPU_DEVICE_MEMCACHING_ALGORITHM", _ALGORITHMS, "BF"),
            max_split_mb=int(options.get("max_split_size_mb", 0)),
            collect_above=float(options.get("garbage_collection_threshold", 0.0)),
        )


def dump_level() -> int:
    """DIPU_DUMP_OP_ARGS, which is read at every call of an operator."""
    return _Variables(os.environ).count("DIPU_DUMP_OP_ARGS", 0)


@dataclass(frozen=True)
class SwitchSettings:
    """What `import ditorch` reads from the environment."""

    device: str = ""
    disabled: bool = False
    compiled: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SwitchSettings:
        given = _Variables(os.environ if environ is None else environ)
        return cls(
            device=given.text("DITORCH_DEVICE") or given.text("DIPU_DEVICE"),
            disabled=given.boolean("DITORCH_DISABLE_MOCK", False),
            compiled=given.boolean("DITORCH_COMPILE", False),
        )


class _Variables:
    """Typed reads of environment variables; an empty one counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def text(self, name: str) -> str:
        return self.environ.get(name, "").strip()

    def _parsed(self, name: str, kind: Kind, default: Any) -> Any:
        given = self.text(name)
        if not given:
            return default
        try:
            return kind.parse(given)
        except _Invalid:
            source = f"environment variable {name}"
            raise ConfigValueError(source, given, kind.expected, kind.fix) from None

    def boolean(self, name: str, default: bool) -> bool:
        return bool(self._parsed(name, BOOLEAN, default))

    def count(self, name: str, default: int) -> int:
        return int(self._parsed(name, COUNT, default))

    def choice(self, name: str, values: Sequence[str], default: str) -> str:
        return str(self._parsed(name, _choice(*values), default))


def _indices(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(_parse_count(part.strip()) for part in text.split(","))
    except _Invalid:
        source = f"environment variable {name}"
        fix = "Give indices separated by commas."
        raise ConfigValueError(source, text, "device indices such as 0,1", fix) from None


def _allocator_options(text: str) -> dict[str, float]:
    """`max_split_size_mb:128,garbage_collection_threshold:0.8` as numbers."""
    known = ("max_split_size_mb", "garbage_collection_threshold")
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        try:
            if name.strip() not in known:
                raise ValueError
            found[name.strip()] = float(value)
        except ValueError:
            expected = f"entries name:number separated by commas, of {', '.join(known)}"
            source = "environment variable DIPU_TORCH_ALLOCATOR_CONF"
            raise ConfigValueError(source, text, expected, "Correct or drop the entry.") from None
    return found
