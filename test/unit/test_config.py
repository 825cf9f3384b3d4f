"""The settings: defaults, environment, options; every wrong value has an exact message."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from dicp.config import (
    BOOLEAN,
    OPTIONS,
    Config,
    default_cache_dir,
    environment_with,
    tools_environment,
    vendor_option,
)
from dicp.errors import ConfigValueError, DicpWarning, UnknownOptionError

BOOLEANS = (
    "cache", "dump_times", "timings", "fuse", "layout", "fallback_random", "freeze", "check_bounds",
    "rnn",
)  # fmt: skip
NAMES = tuple(option.name for option in OPTIONS)


def test_defaults() -> None:
    assert Config.from_env({}) == Config()
    assert dataclasses.asdict(Config()) == {
        "cache_dir": default_cache_dir(),
        "cache": True,
        "cache_size_mb": 4096,
        "dump": None,
        "dump_times": False,
        "timings": False,
        "fallback": "auto",
        "on_compile_error": "raise",
        "eager_ops": (),
        "native_ops": (),
        "rejected": "error",
        "precision": "keep",
        "runs_on": "auto",
        "cxx": "",
        "cxx_flags": (),
        "compile_jobs": 0,
        "fuse": True,
        "layout": True,
        "shape_buckets": (),
        "fallback_random": False,
        "freeze": False,
        "convert_config": None,
        "check_bounds": True,
        "rnn": False,
        "target": "",
        "mode": "default",
        "native_ops_preferred": False,
        "vendor": {},
    }


def test_every_setting_is_in_the_table_with_a_meaning_and_a_variable() -> None:
    assert (*NAMES, "native_ops_preferred", "vendor") == tuple(
        field.name for field in dataclasses.fields(Config)
    )
    for option in OPTIONS:
        assert option.meaning and option.environment[0] == f"DICP_{option.name.upper()}"


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().fuse = False  # type: ignore[misc]


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("On", True), ("YES", True)]
    + [("0", False), ("false", False), ("Off", False), ("no", False)],
)
def test_booleans_from_the_environment(name: str, text: str, value: bool) -> None:
    assert getattr(Config.from_env({f"DICP_{name.upper()}": text}), name) is value


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("DICP_CACHE_DIR", "/a/b", "cache_dir", Path("/a/b")),
        ("DICP_CACHE_DIR", "~/x", "cache_dir", Path.home() / "x"),
        ("DICP_CACHE_SIZE_MB", "12", "cache_size_mb", 12),
        ("DICP_DUMP", "dump", "dump", Path.cwd() / "dump"),
        ("DICP_FALLBACK", "error", "fallback", "error"),
        ("DICP_ON_COMPILE_ERROR", "eager", "on_compile_error", "eager"),
        ("DICP_RUNS_ON", "simulator", "runs_on", "simulator"),
        ("DICP_CXX", "ccache g++", "cxx", "ccache g++"),
        ("CXX", "clang++", "cxx", "clang++"),
        ("DICP_CXX_FLAGS", "-O1 '-DX=a b'", "cxx_flags", ("-O1", "-DX=a b")),
        ("DICP_COMPILE_JOBS", "3", "compile_jobs", 3),
        ("DICP_MODE", "max-autotune", "mode", "max-autotune"),
    ],
)
def test_values_from_the_environment(variable: str, text: str, name: str, value: object) -> None:
    assert Config.from_env({variable: text}) == dataclasses.replace(Config(), **{name: value})


def test_an_old_name_works_and_gives_the_new_one() -> None:
    with pytest.warns(DicpWarning, match="option 'gears' is called 'shape_buckets' now"):
        assert Config().with_options({"gears": "8 16"}).shape_buckets == (8, 16)
    with pytest.warns(DicpWarning, match="DICP_GEARS is called DICP_SHAPE_BUCKETS now"):
        assert Config.from_env({"DICP_GEARS": "8 16"}).shape_buckets == (8, 16)


def test_own_variable_goes_before_the_common_one() -> None:
    assert Config.from_env({"CXX": "clang++", "DICP_CXX": "g++-13"}).cxx == "g++-13"


def test_empty_variable_counts_as_unset() -> None:
    assert Config.from_env({f"DICP_{name.upper()}": "" for name in NAMES}) == Config()


def test_from_env_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DICP_COMPILE_JOBS", "7")
    assert Config.from_env().compile_jobs == 7


def test_unknown_variable_warns() -> None:
    with pytest.warns(DicpWarning) as caught:
        Config.from_env({"DICP_CAHCE": "0"})
    assert str(caught[0].message) == (
        "environment variable DICP_CAHCE is not one that dicp reads; "
        "`python -m dicp config` lists those. Did you mean 'DICP_CACHE'?"
    )


def test_other_variables_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_env({"PATH": "/bin", "TORCH_LOGS": "x", "DICP_FUSE": "0"})
        Config.from_env({"DICP_TOPS_FLAGS": "-x"})  # an installed target's


def test_a_target_s_name_may_have_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("my_chip", "my_chip_dicp:MyChipTarget", "dicp.targets")
    monkeypatch.setattr("dicp.config.settings.entry_points", lambda group: [point])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_env({"DICP_MY_CHIP_TURBO": "1"})
    with pytest.warns(DicpWarning, match="DICP_MY_TURBO is not one"):
        Config.from_env({"DICP_MY_TURBO": "1"})


def test_a_variable_of_a_target_is_known_by_its_options() -> None:
    own = (vendor_option("turbo", BOOLEAN, "DICP_TOPS_TURBO", "raise the clock", default=False),)
    with pytest.warns(DicpWarning, match="DICP_TOPS_TURBA is not one"):
        config = Config.from_env({"DICP_TOPS_TURBA": "1", "DICP_TOPS_TURBO": "1"}, own)
    assert config.vendor == {"turbo": True}


EXPECTED = {
    **dict.fromkeys(
        BOOLEANS,
        "one of 1, true, on, yes, 0, false, off, no. Use 1 to switch it on and 0 to switch it off.",
    ),
    "cache_dir": "the path of a folder. Give a path, such as ~/.cache/dicp.",
    **dict.fromkeys(
        ("dump", "convert_config"), "a path, or nothing. Give a path, or leave it unset."
    ),
    "cache_size_mb": "a whole number, 0 or more. Give it in digits.",
    "compile_jobs": "a whole number, 0 or more. Give it in digits.",
    "fallback": "'auto' or 'error'. Choose one of these.",
    "on_compile_error": "'raise' or 'eager'. Choose one of these.",
    **dict.fromkeys(
        ("eager_ops", "native_ops"),
        "regular expressions of operator names with commas between, such as 'conv2d,add.out'. "
        "Give one text, or a list of texts.",
    ),
    "rejected": "'error' or 'eager'. Choose one of these.",
    "precision": "'keep', 'fast' or 'half'. Choose one of these.",
    "runs_on": "'auto', 'device' or 'simulator'. Choose one of these.",
    "cxx": "the command of a compiler, such as 'g++-13' or 'ccache g++'. "
    "Give it as in a shell, with every quotation closed.",
    "cxx_flags": "compiler flags, such as '-O2 -g'. "
    "Give one text as in a shell, with every quotation closed, or a list of texts.",
    "shape_buckets": "sizes in rising order, such as '128 256 512'. "
    "Give one text with spaces between, or a list of numbers.",
    "target": "the name of an installed target. Give one word.",
    "mode": "'default', 'reduce-overhead', 'max-autotune' or 'max-autotune-no-cudagraphs'. "
    "Choose one of these.",
}
BAD: list[tuple[str, object]] = [
    *((name, "2") for name in BOOLEANS),
    *((name, None) for name in BOOLEANS),
    *((name, 1.0) for name in BOOLEANS),
    ("cache_dir", " "),
    ("cache_dir", 3),
    ("cache_dir", None),
    ("dump", 3),
    ("convert_config", 3),
    ("dump", "~no-such-user-here/x"),
    ("cache_size_mb", "-1"),
    ("cache_size_mb", "4GB"),
    ("cache_size_mb", 1.5),
    ("compile_jobs", -1),
    ("compile_jobs", True),
    ("compile_jobs", None),
    ("fallback", "eager"),
    ("fallback", True),
    ("on_compile_error", "ignore"),
    ("eager_ops", "add("),
    ("eager_ops", 3),
    ("native_ops", ["a", 1]),
    ("rejected", "never"),
    ("precision", "double"),
    ("runs_on", "gpu"),
    ("cxx", "g++ '"),
    ("cxx", ["g++"]),
    ("cxx_flags", "-D'"),
    ("cxx_flags", 3),
    ("cxx_flags", ["-O2", 3]),
    ("shape_buckets", "big"),
    ("shape_buckets", [8, 4]),
    ("shape_buckets", "0 4"),
    ("shape_buckets", 8),
    ("target", "two words"),
    ("target", 3),
    ("mode", "fast"),
    ("mode", []),
]


def test_every_setting_has_a_bad_value_here() -> None:
    assert {name for name, _ in BAD} == set(EXPECTED) == set(NAMES)


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}-{v}" for n, v in BAD])
def test_wrong_option_value(name: str, value: object) -> None:
    message = f"option {name!r} is {value!r}; expected {EXPECTED[name]}"
    with pytest.raises(ConfigValueError) as caught:
        Config().with_options({name: value})
    assert str(caught.value) == message
    with pytest.raises(ConfigValueError) as caught:
        Config(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, v in BAD if isinstance(v, str) and v.strip()]
)
def test_wrong_environment_value(name: str, value: str) -> None:
    variable = f"DICP_{name.upper()}"
    with pytest.raises(ConfigValueError) as caught:
        Config.from_env({variable: value})
    assert str(caught.value) == (
        f"environment variable {variable} is {value!r}; expected {EXPECTED[name]}"
    )


def test_wrong_value_names_the_variable_it_came_from() -> None:
    with pytest.raises(ConfigValueError, match="^environment variable CXX is "):
        Config.from_env({"CXX": "g++ '"})


def test_options_change_a_copy() -> None:
    config = Config()
    changed = config.with_options({"fuse": False, "cxx_flags": ["-g"], "dump": Path("/d")})
    assert changed == dataclasses.replace(config, fuse=False, cxx_flags=("-g",), dump=Path("/d"))
    assert config == Config()
    assert config.with_options(None) is config


def test_options_may_be_text() -> None:
    changed = Config().with_options({"fuse": "off", "compile_jobs": "2", "dump": None})
    assert (changed.fuse, changed.compile_jobs, changed.dump) == (False, 2, None)


def test_unknown_option() -> None:
    with pytest.raises(UnknownOptionError) as caught:
        Config().with_options({"fuze": True})
    assert str(caught.value) == (
        "unknown option 'fuze'. Did you mean 'fuse'? Valid options: "
        f"{', '.join(sorted(NAMES))}. `python -m dicp config` describes each."
    )


@pytest.mark.parametrize(
    ("options", "mode", "result"),
    [
        (None, "max-autotune", "max-autotune"),
        ({"mode": "reduce-overhead"}, None, "reduce-overhead"),
        ({"mode": "max-autotune"}, "max-autotune", "max-autotune"),
        ({}, None, "default"),
    ],
)
def test_mode(options: dict[str, object] | None, mode: str | None, result: str) -> None:
    assert Config().with_options(options, mode).mode == result


def test_wrong_mode() -> None:
    with pytest.raises(ConfigValueError) as caught:
        Config().with_options(None, "fast")
    assert str(caught.value) == f"mode is 'fast'; expected {EXPECTED['mode']}"


def test_contradicting_modes() -> None:
    with pytest.raises(ConfigValueError) as caught:
        Config().with_options({"mode": "default"}, "max-autotune")
    assert str(caught.value) == (
        "mode is 'max-autotune'; expected the same as option 'mode', which is 'default'. "
        "Give it once."
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fallback", "error"),
        ("rejected", "eager"),
        ("precision", "half"),
        ("runs_on", "simulator"),
        ("cxx", "clang++"),
        ("cxx_flags", "-g"),
        ("fuse", False),
        ("layout", False),
        ("shape_buckets", "8 16"),
        ("fallback_random", True),
        ("freeze", True),
        ("check_bounds", False),
        ("mode", "max-autotune"),
    ],
)
def test_key_has_what_changes_code(name: str, value: object) -> None:
    assert Config().with_options({name: value}).key() != Config().key()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_dir", "/x"),
        ("cache", False),
        ("cache_size_mb", 1),
        ("dump", "/x"),
        ("timings", True),
        ("on_compile_error", "eager"),
        ("compile_jobs", 1),
    ],
)
def test_key_lacks_what_does_not(name: str, value: object) -> None:
    assert Config().with_options({name: value}).key() == Config().key()


def test_derived_values() -> None:
    assert Config(cache_size_mb=2).cache_bytes == 2 * 2**20
    assert Config(compile_jobs=3).jobs == 3
    assert Config().jobs >= 1


def test_a_variable_may_be_removed_while_the_environment_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compilers start in threads of their own, while the program changes its environment."""

    class Changing(dict[str, str]):
        def keys(self) -> Any:
            return [*super().keys(), "REMOVED"]

        def __iter__(self) -> Iterator[str]:
            return iter(self.keys())

    monkeypatch.setattr(os, "environ", Changing(KEPT="1", PATH="/bin"))
    assert tools_environment() == {"KEPT": "1", "PATH": "/bin"}
    assert environment_with(KEPT="2") == {"KEPT": "2", "PATH": "/bin"}
