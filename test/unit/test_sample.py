"""The rotating sample that CI runs of a slow backend's tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from dicp.testing import op, sample

TESTS = [
    f"test/op/test_{name}.py::test_op[{k}]" for name in ("norm", "pointwise") for k in range(90)
]
TESTS += [f"test/model/test_llama.py::test_{k}" for k in range(20)]


def test_every_test_is_in_one_part() -> None:
    parts = [sample.sample(TESTS, k, 10, []) for k in range(10)]
    assert Counter(test for part in parts for test in part) == Counter(TESTS)
    for part in parts:
        assert len(part) == 20 and sum("model" in test for test in part) == 2


def test_parts_change_with_the_time_of_day() -> None:
    day = 24 * 3600.0
    assert len({sample.part("10", now)[0] for now in (0, day / 3, 2 * day / 3, day)}) == 4
    assert {sample.part("10", k * day)[0] for k in range(10)} == set(range(10))
    assert sample.part("10:3", 12345.0) == (3, 10)


def test_tests_of_changed_files_are_taken() -> None:
    changed = ["dicp/vendor/ascend/rules/elementwise.py", "README.md", "test/model/test_llama.py"]
    taken = sample.sample(TESTS, 4, 10, changed) - sample.sample(TESTS, 4, 10, [])
    assert not any("norm" in test for test in taken)
    assert 10 < len([t for t in taken if "pointwise" in t]) < len(taken)
    assert len(taken) <= sample.MAX_CHANGED_OF_SAMPLE


FORMS = [
    f"test/op/test_norm.py::test_op[case{k}-{form}]"
    for k in range(40)
    for form in ("static", "dynamic")
]
SINGLE = ["test/op/test_norm.py::test_op[static_size-static]", "test/unit/test_ir.py::test_a"]
MARKED = [f"test/unit/test_routines.py::test_products[{k}]" for k in range(30)]
PROGRAMS = [f"test/device/test_programs.py::test_{k}" for k in range(6)]


def test_a_sweep_is_run_in_turns_and_single_tests_always() -> None:
    tests = [*FORMS, *SINGLE, *MARKED, *PROGRAMS]
    halves = [sample.sweeps(tests, {*MARKED, *PROGRAMS}, k, 2, []) for k in range(2)]
    assert halves[0] | halves[1] == set(tests) and halves[0] & halves[1] == set(SINGLE)
    for half in halves:
        cases = [test.rpartition("-")[0] for test in half & set(FORMS)]
        assert len(cases) == len(set(cases)) == 40
        assert 10 < sum("dynamic" in test for test in half) < 30
        assert len(half & set(MARKED)) == 15 and len(half & set(PROGRAMS)) == 3


def test_turns_have_as_many_tests_and_slow_ones_take_turns() -> None:
    small = [f"test/unit/test_{k}.py::test_a[{n}]" for k in range(400) for n in range(2)]
    slow = [f"test/unit/test_{k}.py::test_slow" for k in range(400)]
    turns = [sample.sweeps([*small, *slow], {*small, *slow}, k, 8, []) for k in range(8)]
    assert Counter(test for turn in turns for test in turn) == Counter([*small, *slow])
    for kind in (small, slow):
        counts = [len(turn & set(kind)) for turn in turns]
        assert max(counts) < 1.5 * min(counts)


def test_sweeps_of_changed_files_are_run_whole() -> None:
    taken = sample.sweeps(FORMS, (), 0, 2, ["dicp/loop/lowering/norm.py"])
    assert taken == set(FORMS)


@pytest.mark.parametrize("parts", [2, 4])
def test_the_variants_of_a_case_are_taken_in_parts(parts: int) -> None:
    cases = [replace(op(f"case{k}", torch.relu, (6, 37)), turn=None) for k in range(24)]
    for case in cases:
        taken = [replace(case, turn=(turn, parts)).variants() for turn in range(parts)]
        assert all(part[0] == case.variants()[0] for part in taken)
        assert Counter(v for part in taken for v in part[1:]) == Counter(case.variants()[1:])
    assert len({str(replace(case, turn=(0, parts)).variants()) for case in cases}) == parts


def test_all_turns_together_take_every_variant_with_both_shapes() -> None:
    case, forms, ran = op("relu", torch.relu, (2, 3)), FORMS[:2], set()
    for number in range(8):
        (form,) = sample.sweeps(forms, (), number, 8, [])
        taken = replace(case, turn=sample.variants(number, 8)).variants()
        ran |= {(form, str(variant)) for variant in taken}
    assert ran == {(form, str(variant)) for form in forms for variant in case.variants()}
