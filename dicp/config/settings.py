"""The settings of one compilation: the table behind environment variables and options."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import platformdirs

from dicp.config.kinds import (
    BOOLEAN,
    COMMAND,
    COUNT,
    NAME,
    OPERATORS,
    OPTIONAL_PATH,
    PATH,
    SIZES,
    WORDS,
    choice,
)
from dicp.config.process import processors
from dicp.config.table import Option, options_of, read, setting
from dicp.errors import ConfigValueError, DicpWarning, UnknownOptionError
from dicp.errors.text import did_you_mean, nearest

__all__ = ["OPTIONS", "TARGET_GROUP", "Config", "asked", "default_cache_dir"]

TARGET_GROUP = "dicp.targets"
"""The entry-point group under which packages register targets."""


def default_cache_dir() -> Path:
    """The user's cache folder for dicp, at the operating system's standard place."""
    return platformdirs.user_cache_path("dicp", appauthor=False)


RENAMED = {"gears": "shape_buckets"}
"""Options that had another name: the old one works, with a warning that gives the new one."""

PREFERRED_NATIVE = "DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS"
"""The variable of older scripts for `native_ops`: a preference, whose breach is a warning."""


@dataclass(frozen=True)
class Config:
    """All settings of one compilation. Values are checked and normalized on construction."""

    cache_dir: Path = setting(
        PATH,
        "DICP_CACHE_DIR",
        "folder in which the disk cache makes one of its own, private to the user",
        factory=default_cache_dir,
        default_text="the user's cache folder",
    )
    cache: bool = setting(
        BOOLEAN, "DICP_CACHE", "keep compiled results on disk between processes", default=True
    )
    cache_size_mb: int = setting(
        COUNT,
        "DICP_CACHE_SIZE_MB",
        "least recently used entries go when the cache is larger than this",
        default=4096,
    )
    dump: Path | None = setting(
        OPTIONAL_PATH,
        "DICP_DUMP",
        "folder for the graph after each stage, the program and the generated source",
        default=None,
    )
    dump_times: bool = setting(
        BOOLEAN,
        "DICP_DUMP_TIMES",
        "with dump: time every kernel and call at a graph's first run, which is repeated for it on "
        "copies of what it overwrites",
        default=False,
    )
    timings: bool = setting(
        BOOLEAN, "DICP_TIMINGS", "report the seconds of each stage of a compilation", default=False
    )
    fallback: Literal["auto", "error"] = setting(
        choice("auto", "error"),
        "DICP_FALLBACK",
        "an operator the target does not compile runs eagerly, or is an error",
        default="auto",
        changes_code=True,
    )
    on_compile_error: Literal["raise", "eager"] = setting(
        choice("raise", "eager"),
        "DICP_ON_COMPILE_ERROR",
        "a failed compilation raises, or runs the graph eagerly with one warning",
        default="raise",
    )
    eager_ops: tuple[str, ...] = setting(
        OPERATORS,
        "DICP_EAGER_OPS DIPU_FORCE_FALLBACK_OPS_LIST",
        "operators that stay eager calls: regular expressions of names such as conv2d, add.out",
        default=(),
        changes_code=True,
    )
    native_ops: tuple[str, ...] = setting(
        OPERATORS,
        f"DICP_NATIVE_OPS {PREFERRED_NATIVE}",
        "operators that may be neither left to eager nor decomposed, else it is an error "
        f"({PREFERRED_NATIVE}: a warning)",
        default=(),
        changes_code=True,
    )
    rejected: Literal["error", "eager"] = setting(
        choice("error", "eager"),
        "DICP_REJECTED",
        "an operator that the vendor's graph compiler refuses is an error, or runs eagerly",
        default="error",
        changes_code=True,
    )
    precision: Literal["keep", "fast", "half"] = setting(
        choice("keep", "fast", "half"),
        "DICP_PRECISION",
        "keep: float32 is computed as such; fast: the vendor may multiply it in reduced precision "
        "(TF32, bf16); half: it may compute it in 16 bits",
        default="keep",
        changes_code=True,
    )
    runs_on: Literal["auto", "device", "simulator"] = setting(
        choice("auto", "device", "simulator"),
        "DICP_RUNS_ON",
        "run on the device, on the target's simulator, or on whichever is there",
        default="auto",
        changes_code=True,
    )
    cxx: str = setting(
        COMMAND,
        "DICP_CXX CXX",
        "C++ compiler; empty: the first of g++, clang++ that is found",
        default="",
        changes_code=True,
    )
    cxx_flags: tuple[str, ...] = setting(
        WORDS,
        "DICP_CXX_FLAGS",
        "flags added after dicp's own when generated C++ is compiled",
        default=(),
        changes_code=True,
    )
    compile_jobs: int = setting(
        COUNT, "DICP_COMPILE_JOBS", "compilers run side by side; 0: one per processor", default=0
    )
    fuse: bool = setting(
        BOOLEAN,
        "DICP_FUSE",
        "fuse subgraphs such as attention and norms",
        default=True,
        changes_code=True,
    )
    layout: bool = setting(
        BOOLEAN,
        "DICP_LAYOUT",
        "choose memory formats per operator, such as channels-last convolutions",
        default=True,
        changes_code=True,
    )
    shape_buckets: tuple[int, ...] = setting(
        SIZES,
        "DICP_SHAPE_BUCKETS DICP_GEARS",
        "sizes that symbolic dimensions are padded up to, where that changes no result: one static "
        "graph for each; empty: dimensions stay dynamic",
        default=(),
        changes_code=True,
    )
    fallback_random: bool = setting(
        BOOLEAN,
        "DICP_FALLBACK_RANDOM",
        "draw random numbers with the eager operators, bit for bit",
        default=False,
        changes_code=True,
    )
    freeze: bool = setting(
        BOOLEAN,
        "DICP_FREEZE",
        "inference only: treat parameters as constants and fold them",
        default=False,
        changes_code=True,
    )
    convert_config: Path | None = setting(
        OPTIONAL_PATH,
        "DICP_CONVERT_CONFIG",
        "adaptor file: dtypes and layouts to convert to before operators; unset: the "
        "convert_config.yaml beside the target, if it ships one",
        default=None,
    )
    check_bounds: bool = setting(
        BOOLEAN,
        "DICP_CHECK_BOUNDS",
        "indices from tensors are checked, and divisors of integers in a vendor's graph; off: an "
        "index out of range is undefined behaviour. In a vendor's graph, it does as the vendor's "
        "operator: an error, or the nearest element",
        default=True,
        changes_code=True,
    )
    rnn: bool = setting(
        BOOLEAN,
        "DICP_RNN",
        "trace nn.LSTM, nn.GRU and nn.RNN, which Dynamo leaves to eager: sets "
        "torch._dynamo.config.allow_rnn for the process",
        default=False,
    )
    target: str = setting(
        NAME,
        "DICP_TARGET",
        "the target that backend='dicp' compiles for; empty: the one of highest priority for the "
        "inputs' device",
        default="",
        changes_code=False,
    )
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        setting(
            choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
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
            **read(OPTIONS, environ),
            native_ops_preferred=bool(
                environ.get(PREFERRED_NATIVE) and not environ.get("DICP_NATIVE_OPS")
            ),
            vendor={**own, **read(vendor, environ)},
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
        for given, value in (options or {}).items():
            name = _present_name(given)
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
        return self.compile_jobs or processors()


def asked(name: str, options: Mapping[str, Any]) -> Any:
    """The value of a setting in `options` or else in the environment; None where it is in none."""
    option = next(option for option in OPTIONS if option.name == name)
    if name in options:
        return option.parse(options[name], f"option {name!r}")
    return read([option], os.environ).get(name)


def _present_name(option: str) -> str:
    """The name of an option now, with a warning where `option` is its old one."""
    if option in RENAMED:
        message = f"option {option!r} is called {RENAMED[option]!r} now"
        warnings.warn(DicpWarning(message), stacklevel=4)
    return RENAMED.get(option, option)


def _agreed_mode(mode: str, option: str | None) -> str:
    if option is not None and option != mode:
        raise ConfigValueError(
            "mode", mode, f"the same as option 'mode', which is {option!r}", "Give it once."
        )
    return mode


def _warn_unknown_variables(environ: Mapping[str, str], vendor: Sequence[Option]) -> None:
    known = {name for option in (*OPTIONS, *vendor) for name in option.environment}
    for old, new in RENAMED.items():
        if environ.get(variable := f"DICP_{old.upper()}"):
            message = f"environment variable {variable} is called DICP_{new.upper()} now"
            warnings.warn(DicpWarning(message), stacklevel=3)
    for name in sorted(environ):
        if name.startswith("DICP_") and name not in known and not _is_of_another(name, vendor):
            near = nearest(name, [each.lower() for each in known])
            warnings.warn(
                f"environment variable {name} is not one that dicp reads; "
                f"`python -m dicp config` lists those.{did_you_mean(near and near.upper())}",
                DicpWarning,
                stacklevel=3,
            )


def _is_of_another(variable: str, vendor: Sequence[Option]) -> bool:
    """Whether a variable is named after an installed target other than that of the options."""
    own = [name for option in vendor for name in option.environment]
    prefixes = (f"DICP_{point.name.upper()}_" for point in entry_points(group=TARGET_GROUP))
    return any(
        variable.startswith(prefix) and not any(name.startswith(prefix) for name in own)
        for prefix in prefixes
    )


OPTIONS: tuple[Option, ...] = options_of(Config)
