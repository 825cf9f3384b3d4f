"""Every kernel of the tests compiled for an NVIDIA GPU, too, in all variants of launches.

    make nvidia

A test whose kernels are refused fails; the number of distinct kernels is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.nvidia import VARIANTS, compile_for_nvidia, kernels_of

from dicp.vendor.maca.simulator import HostCompiler

KERNELS = pytest.StashKey[set[str]]()


def pytest_configure(config: pytest.Config) -> None:
    seen = config.stash[KERNELS] = set()
    compile_for_host = HostCompiler.compile

    def compile_for_both(self: HostCompiler, text: str, names: Sequence[str]) -> bytes:
        new = {name: body for name, body in kernels_of(text).items() if name not in seen}
        for defines in VARIANTS:
            compile_for_nvidia(new, defines)
        seen.update(new)
        return compile_for_host(self, text, names)

    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setattr(HostCompiler, "compile", compile_for_both)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[KERNELS].update(getattr(node, "workeroutput", {}).get("nvidia", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["nvidia"] = sorted(session.config.stash[KERNELS])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    count = len(config.stash[KERNELS])
    terminalreporter.write_line(f"{count} distinct kernels compiled in {len(VARIANTS)} variants")
