"""The emulation of a GPU on the host: what it runs, and what it finds wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dicp import toolchain as host
from dicp.config import Config
from dicp.vendor.maca.simulator import ERRORS, host_compiler
from dicp.vendor.maca.target import MacaTarget
from dicp.vendor.maca.units import TARGET

KERNELS: dict[str, tuple[str, str]] = {
    "barriers_differ": ("{1}, {64}", """
      if (threadIdx.x < 32) {
        __syncthreads();
      } else {
        __syncthreads();
      }"""),
    "one_wave_waits": ("{1}, {128}", """
      if (threadIdx.x < 64) return;
      __syncthreads();"""),
    "one_thread_ends": ("{1}, {64}", """
      if (threadIdx.x == 5) return;
      __syncthreads();"""),
    "half_a_wave_exchanges": ("{1}, {64}", """
      if (threadIdx.x < 32) to[threadIdx.x] = __shfl_down((int64_t)threadIdx.x, 1);"""),
    "all_write_one": ("{1}, {64}", """
      __shared__ d_shared<int64_t, 4> room;
      room[1] = threadIdx.x;
      __syncthreads();"""),
    "reads_too_early": ("{1}, {64}", """
      __shared__ d_shared<int64_t, 64> room;
      room[threadIdx.x] = threadIdx.x;
      to[threadIdx.x] = room[(threadIdx.x + 1) % 64];
      __syncthreads();"""),
    "writes_too_early": ("{1}, {64}", """
      __shared__ d_shared<int64_t, 64> room;
      room[threadIdx.x] = threadIdx.x;
      __syncthreads();
      to[threadIdx.x] = room[(threadIdx.x + 1) % 64];
      room[threadIdx.x] = 0;
      __syncthreads();"""),
    "past_shared_memory": ("{1}, {64}", """
      __shared__ d_shared<int64_t, 63> room;
      room[threadIdx.x] = 1;
      __syncthreads();"""),
    "blocks_write_one": ("{3}, {1}", "to[0] = blockIdx.x + 1;"),
    "a_block_reads_of_another": ("{2}, {1}", "to[blockIdx.x] = to[(blockIdx.x + 1) % 2] + 7;"),
    "threads_write_one": ("{1}, {64}", """
      to[0] = threadIdx.x + 1;
      __syncthreads();"""),
    "a_thread_reads_of_another": ("{1}, {64}", """
      to[threadIdx.x] = threadIdx.x + 1;
      to[64 + threadIdx.x] = to[63 - threadIdx.x];
      __syncthreads();"""),
    "past_the_wave": ("{1}, {64}", "to[threadIdx.x] = __shfl((int64_t)threadIdx.x, 64);"),
    "too_many_threads": ("{1}, {2048}", "__syncthreads();"),
    "neighbours": ("{1}, {128}", """
      __shared__ d_shared<int64_t, 128> room;
      room[threadIdx.x] = 10 * threadIdx.x;
      __syncthreads();
      to[threadIdx.x] = room[(threadIdx.x + 1) % 128];"""),
    "downwards": ("{1}, {128}", "to[threadIdx.x] = __shfl_down((int64_t)threadIdx.x, 5);"),
    "upwards": ("{1}, {128}", "to[threadIdx.x] = __shfl_up((int64_t)threadIdx.x, 5);"),
    "through_global_memory": ("{2}, {128}", """
      const d_index first = blockIdx.x * 256;
      to[first + threadIdx.x] = first + threadIdx.x;
      __syncthreads();
      to[first + 128 + threadIdx.x] = to[first + 127 - threadIdx.x];"""),
    "many_addresses": ("{600}, {1024}", "to[blockIdx.x * 1024 + threadIdx.x] = threadIdx.x;"),
    "blocks_add": ("{5}, {64}", "d_atomic_sum(to, (d_index)(threadIdx.x % 2), (int64_t)1);"),
    "everywhere": ("{2, 3, 4}, {4, 2, 2}", """
      const d_index block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      const d_index thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      to[block * 16 + thread] = 1000 * block + thread;
      __syncthreads();"""),
}  # fmt: skip
"""Name of a kernel -> its grid and block, and its body."""
WRONG = {
    "barriers_differ": 16, "one_wave_waits": 17, "one_thread_ends": 17,
    "half_a_wave_exchanges": 17, "all_write_one": 19, "reads_too_early": 19,
    "writes_too_early": 19, "past_shared_memory": 18, "blocks_write_one": 20,
    "a_block_reads_of_another": 20, "threads_write_one": 20, "a_thread_reads_of_another": 20,
    "past_the_wave": 21, "too_many_threads": 22,
}  # fmt: skip
"""Name of a kernel -> the first element of `status`."""
SAID = {
    "all_write_one": "thread 1 accesses element 1 of an array in shared memory that another",
    "past_shared_memory": "thread 63 accesses element 63 of 63 in shared memory",
    "blocks_write_one": "thread 0 of block 1 and another access an element of global memory",
    "a_thread_reads_of_another": "thread 32 of block 0 and another access an element of",
    "past_the_wave": "an exchange with lane 64 of a wave of 64",
    "too_many_threads": "a block of 2048 threads; the most are 1024",
}  # fmt: skip
"""Name of a kernel -> what its error says."""
GROUPS = (1, 2, 16, 32, 64, 128, 256)
GROUPED = {
    "sum": "x = d_reduce<d_op_sum, {0}>(x, room);",
    "max": "x = d_reduce<d_op_max, {0}>(x, room);",
    "scan": "int64_t before = 100; x = d_scan<d_op_sum, {0}>(x, before, room);",
    "carry": "int64_t before = 100; d_scan<d_op_sum, {0}>(x, before, room); x = before;",
    "place": "int64_t at = d_thread(); d_reduce_pair<d_first_max, {0}>(x, at, room, more); x = at;",
}
THREADS = 256


def source() -> tuple[str, list[str]]:
    """A unit with all kernels, and their names."""
    bodies = dict(KERNELS)
    for name, text in GROUPED.items():
        for group in GROUPS:
            body = (
                "__shared__ d_shared<int64_t, 8> room, more;\n int64_t x = to[threadIdx.x];\n"
                f"{text.format(group)}\n to[threadIdx.x] = x;"
            )
            bodies[f"{name}_{group}"] = (f"{{1}}, {{{THREADS}}}", body)
    parts = ['#include "device.h"']
    for name, (shape, body) in bodies.items():
        parts.append(
            f"D_KERNEL void {name}(d_global<int64_t> to) {{\n{body}\n}}\nD_LAUNCHER({name}) {{\n"
            f"  d_run_together({shape}, [&] {{ {name}((int64_t*)args[0]); }});\n}}"
        )
    return "\n".join(parts), list(bodies)


class Emulation:
    def __init__(self, **options: Any) -> None:
        text, names = source()
        config = Config.from_env({}, MacaTarget.options)
        compiler = host_compiler(config.with_options(options, vendor=MacaTarget.options))
        content = compiler.compile(text, names)
        self.library = host.load_content(TARGET, content, [f"{n}_run" for n in names])

    def status(self, name: str, values: np.ndarray) -> list[int]:
        """Runs a kernel on `values` in place; returns its status."""
        status = (ctypes.c_int64 * 4)()
        args = (ctypes.c_void_p * 1)(values.ctypes.data)
        self.library[f"{name}_run"](args, None, status)
        return list(status)

    def run(self, name: str, values: np.ndarray) -> int:
        """As `status`; returns its first element."""
        return self.status(name, values)[0]


@pytest.fixture(scope="module")
def checked() -> Iterator[Emulation]:
    yield Emulation(maca_checked=True)


@pytest.fixture(scope="module")
def unchecked() -> Iterator[Emulation]:
    yield Emulation()


@pytest.fixture(scope="module", params=["64", "32", "64, checked"])
def any_wave(request: pytest.FixtureRequest) -> Iterator[Emulation]:
    wave, *more = request.param.split(", ")
    yield Emulation(maca_wave=int(wave), maca_checked=bool(more))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str, checked: Emulation) -> None:
    status = checked.status(name, np.zeros(2048, np.int64))
    assert status[0] == WRONG[name]
    assert SAID.get(name, "") in ERRORS[status[0]].format(*status)


@pytest.mark.parametrize("name", [name for name in WRONG if WRONG[name] in (16, 17, 18, 22)])
def test_what_is_found_without_the_checking_mode(name: str, unchecked: Emulation) -> None:
    assert unchecked.status(name, np.zeros(2048, np.int64))[0] == WRONG[name]


def test_every_error_has_a_test() -> None:
    assert set(WRONG.values()) == set(ERRORS) == {WRONG[name] for name in SAID} | {16, 17}


def test_threads_wait_for_each_other(checked: Emulation) -> None:
    found = np.zeros(128, np.int64)
    assert checked.run("neighbours", found) == 0
    assert (found == 10 * ((np.arange(128) + 1) % 128)).all()


def test_barriers_order_accesses_to_global_memory(checked: Emulation) -> None:
    found = np.zeros(512, np.int64)
    assert checked.run("through_global_memory", found) == 0
    upwards = np.arange(128)
    wanted = np.concatenate([upwards, 127 - upwards])
    assert (found == np.concatenate([wanted, 256 + wanted])).all()


def test_a_launch_that_is_checked_in_part_says_so(
    checked: Emulation, capfd: pytest.CaptureFixture[str]
) -> None:
    assert checked.run("many_addresses", np.zeros(600 * 1024, np.int64)) == 0
    assert capfd.readouterr().err.count("more than 524288 addresses of global memory") == 1
    assert checked.run("everywhere", np.zeros(2048, np.int64)) == 0
    assert not capfd.readouterr().err


def test_exchanges_end_at_the_wave(checked: Emulation) -> None:
    lane = np.arange(128)
    for name, step in (("downwards", 5), ("upwards", -5)):
        found = np.zeros(128, np.int64)
        assert checked.run(name, found) == 0
        other = lane + step
        assert (found == np.where(other // 64 == lane // 64, other, lane)).all()


def test_atomics_of_many_blocks_are_no_race(checked: Emulation) -> None:
    found = np.zeros(2, np.int64)
    assert checked.run("blocks_add", found) == 0
    assert found.tolist() == [160, 160]


def test_grids_and_blocks_have_three_dimensions(checked: Emulation) -> None:
    found = np.zeros(2 * 3 * 4 * 16, np.int64)
    assert checked.run("everywhere", found) == 0
    assert (found.reshape(24, 16) == 1000 * np.arange(24)[:, None] + np.arange(16)).all()


@pytest.mark.parametrize("group", GROUPS)
def test_groups_reduce_and_scan(group: int, any_wave: Emulation) -> None:
    values = np.random.default_rng(group).integers(-9, 9, (THREADS // group, group))
    want = {
        "sum": values.sum(1, keepdims=True), "max": values.max(1, keepdims=True),
        "scan": 100 + values.cumsum(1), "carry": 100 + values.sum(1, keepdims=True),
        "place": values.argmax(1)[:, None] + group * np.arange(THREADS // group)[:, None],
    }  # fmt: skip
    for name, expected in want.items():
        found = values.copy()
        assert any_wave.run(f"{name}_{group}", found) == 0
        assert (found == np.broadcast_to(expected, values.shape)).all(), name
