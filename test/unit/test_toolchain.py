"""The host compiler: found, missing, broken; and how a failure is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import script
from torch._dynamo.exc import BackendCompilerFailed

from dicp import Backend
from dicp import toolchain as host
from dicp.config import Config
from dicp.errors import CompilerError, SerialWarning, ToolchainError
from dicp.toolchain import COMPILERS
from dicp.vendor.cpu import toolchain as cpu_toolchain
from dicp.vendor.cpu.routines.common import GROUPS, TYPES, Group
from dicp.vendor.cpu.toolchain import (
    BASE_FLAGS,
    compile_shared,
    find_toolchain,
    has_tiles,
    vector_math,
)
from dicp.vendor.cpu.units import header_texts, unit_text


def test_the_first_compiler_found_is_used() -> None:
    toolchain = find_toolchain(Config())
    assert os.access(toolchain.compiler, os.X_OK)
    assert toolchain.version and toolchain.version in toolchain.identity


def test_flags_of_the_user_come_last_and_are_part_of_the_identity() -> None:
    plain, extra = find_toolchain(Config()), find_toolchain(Config(cxx_flags="-O1 -g"))
    assert extra.flags == (*plain.flags, "-O1", "-g")
    assert extra.identity != plain.identity


def test_clang_is_given_no_flag_that_it_refuses(tmp_path: Path) -> None:
    body = """[ "$1" = --version ] && echo 'Debian clang version 14.0.6' || exec g++ "$@\""""
    clang = script(tmp_path / "c++", body)
    flags = find_toolchain(Config(cxx=clang)).flags
    tiles = ("-DDICP_TILES",) if has_tiles() else ()
    assert flags == (*BASE_FLAGS, "-fopenmp", *vector_math(is_clang=True), *tiles)
    assert find_toolchain(Config(cxx="g++")).flags[: len(BASE_FLAGS)] == BASE_FLAGS


@pytest.mark.parametrize(
    ("version", "vendor", "gathers"),
    [("12.2.0", "AuthenticAMD", False), ("12.2.0", "GenuineIntel", True),
     ("13.2.0", "AuthenticAMD", True)],
)  # fmt: skip
def test_gcc_12_uses_no_gather_instruction_on_amd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, vendor: str, gathers: bool
) -> None:
    body = f"""[ "$1" = --version ] && echo 'g++ (A-1) {version}' || exec g++ "$@\""""
    monkeypatch.setattr(cpu_toolchain, "cpu_model", lambda: f"{vendor}|a processor|avx512f")
    flags = find_toolchain(Config(cxx=script(tmp_path / "c++", body))).flags
    assert (cpu_toolchain.NO_GATHER[0] not in flags) == gathers


@pytest.mark.parametrize("refused", ["-fopenmp", "-fopenmp*"])
def test_compiler_without_openmp_builds_serial_kernels(tmp_path: Path, refused: str) -> None:
    """Apple's clang++ refuses -fopenmp and takes -fopenmp-simd."""
    real = find_toolchain(Config()).compiler
    body = f"""if [ "$1" = --version ]; then echo 'Apple clang version 15'; exit; fi
for word; do case "$word" in {refused}) echo "unsupported option $word" >&2; exit 1;; esac; done
exec {real} "$@\""""
    config = Config(cxx=script(tmp_path / "c++", body))
    with pytest.warns(SerialWarning, match="run on one thread") as seen:
        flags = {find_toolchain(config).flags for _ in range(2)}.pop()
    assert len(seen) == 1
    assert [f for f in flags if "openmp" in f] == (["-fopenmp-simd"] if "*" not in refused else [])


@pytest.mark.sweep
@pytest.mark.parametrize("compiler", [name for name in COMPILERS if shutil.which(name)])
def test_routines_are_built_by_every_compiler_here(compiler: str) -> None:
    toolchain = find_toolchain(Config(cxx=compiler))
    for name, dtype in product(GROUPS, TYPES):
        group = Group.of(name, dtype)
        text = unit_text(group.header, group.bodies(), {})
        files = {"unit.cpp": text, **header_texts()}
        compile_shared(toolchain.with_flags((*group.flags, "-O0")), files, "unit.cpp")


def test_missing_compiler_says_what_to_install() -> None:
    with pytest.raises(ToolchainError, match="/nonexistent.*Install g\\+\\+.*DICP_CXX"):
        find_toolchain(Config(cxx="/nonexistent"))


def test_compiler_that_does_not_start(tmp_path: Path) -> None:
    broken = script(tmp_path / "broken", "exit 3")
    with pytest.raises(ToolchainError, match="--version fails"):
        find_toolchain(Config(cxx=broken))


def test_shared_object_is_built_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    built = compile_shared(
        find_toolchain(Config()), {"a.cpp": 'extern "C" int f() { return 7; }\n'}, "a.cpp"
    )
    assert built.startswith(b"\x7fELF")
    assert list(tmp_path.iterdir()) == []


def test_first_errors_are_shown_of_many() -> None:
    text = "// a remark\n" + "\n".join(f"int f{k}() {{ return nothing{k}; }}" for k in range(40))
    with pytest.raises(CompilerError) as caught:
        compile_shared(find_toolchain(Config()), {"a.cpp": text}, "a.cpp")
    message = str(caught.value)
    assert "nothing0" in message and "nothing30" not in message
    assert "nothing30" in caught.value.diagnostics
    assert "and 37 more" in message
    assert "compiled from" not in message, "a comment in the text is no origin"


@pytest.mark.parametrize("target", ["cpu", "ascend", "tops"])
def test_a_compiler_error_names_the_operators(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_host = host.compile_shared

    def failing(*args: Any, sources: Sequence[str] = (), **options: Any) -> bytes:
        if sources:
            raise CompilerError(target, ["cxx"], "error: no", sources)
        return compile_host(*args, sources=sources, **options)

    monkeypatch.setattr(host, "compile_shared", failing)
    fn = torch.compile(lambda x: torch.relu(x).exp(), backend=Backend(target, cache=False))
    with pytest.raises(BackendCompilerFailed) as caught:
        fn(torch.ones(3))
    sources = caught.value.inner_exception.kernel_sources
    names = [re.sub(r" at .*test_toolchain.py:\d+$", "", source) for source in sources]
    assert names == ["aten.relu.default (relu)", "aten.exp.default (exp)"]


def test_compiler_that_succeeds_without_output(tmp_path: Path) -> None:
    lazy = script(tmp_path / "lazy", 'if [ "$1" = --version ]; then echo lazy 1; fi; exit 0')
    with pytest.raises(CompilerError, match="it ended with status 0 and wrote no unit.so"):
        compile_shared(find_toolchain(Config(cxx=lazy)), {"a.cpp": "\n"}, "a.cpp")


def test_command_with_arguments_is_accepted() -> None:
    toolchain = find_toolchain(Config(cxx=f"{find_toolchain(Config()).compiler} -DX=1"))
    built = compile_shared(toolchain, {"a.cpp": "#if X != 1\n#error\n#endif\n"}, "a.cpp")
    assert built


SPILLED = re.compile(r"vdpbf16ps [^\n]*(%zmm\d+)\n(?:[^\n]*\n)?[^\n]*vmov\w+ +\1,[^\n]*\(%r[sb]p")
"""A sum that is stored on the stack after a product was added to it."""


@pytest.mark.parametrize("name", ["attention", "attention_gradients", "product", "dots"])
def test_sums_of_tiles_stay_in_registers(name: str, tmp_path: Path) -> None:
    """g++ keeps an array of sums in memory if its elements are operands of `asm`."""
    group = Group(name, "_bf16")
    files = {"unit.cpp": unit_text(group.header, group.bodies(), {}), **header_texts()}
    flags = ("-march=x86-64-v4", "-mavx512bf16", "-UDICP_TILES")
    toolchain = find_toolchain(Config(cxx="g++", cxx_flags=flags)).with_flags(group.flags)
    (tmp_path / "unit.so").write_bytes(compile_shared(toolchain, files, "unit.cpp"))
    command = ["objdump", "-d", "--no-show-raw-insn", str(tmp_path / "unit.so")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert text.count("vdpbf16ps") > 10 and not SPILLED.findall(text)
