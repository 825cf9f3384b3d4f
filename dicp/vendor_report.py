"""`python -m dicp vendor-report`: how far a vendor is, and what to do next.

Operators are counted by decision. Outcomes of tests, and the operators that ran eagerly in them,
come from files that `pytest --results FILE` wrote.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dicp.serving  # noqa: F401  (registers torch.ops.lightllm)
from dicp.dynamo_bridge.conversion import OperatorRow, core_overloads, operator_row, operator_table
from dicp.errors import ResultsFileError
from dicp.graphop.rules import RULES as GRAPH_RULES
from dicp.graphop.target import GraphTarget
from dicp.loop.lowering import RULES as LOOP_RULES
from dicp.target import Target
from dicp.torch_private import overloads_of, schema_of

PUBLIC = """
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _log_softmax
_native_batch_norm_legit_functional _softmax _unsafe_view abs add addmm alias amax arange argmax
argmin bernoulli bmm cat clone prims.convert_element_type convolution convolution_backward copy
copy_ cos div embedding empty_like eq erf exp expand fill full full_like gather ge gelu
gelu_backward getitem group_norm hardswish hardswish_backward index index_put prims.iota le
lift_fresh_copy log logical_or lt masked_fill max_pool2d_with_indices
max_pool2d_with_indices_backward maximum mean mm mul native_dropout native_layer_norm ne neg
new_empty_strided ones ones_like permute pow reciprocal relu repeat repeat_interleave rsqrt
scalar_tensor scatter select select_scatter sigmoid sin slice slice_scatter softmax split sqrt
square squeeze stack sub sum transpose tril triu unsqueeze upsample_nearest2d view view_as_complex
view_as_real where zeros zeros_like lightllm.copy_with_offset lightllm.flash_attention_inference
lightllm.paged_attention lightllm.prompt_attention_inference lightllm.rotary_emb
""".split()
"""The operators that the test suite of public DICP has a file for; of ATen, but for the named."""
BEST = ("compiled", "library", "view", "decomposed", "eager")
"""Decisions; an operator counts by the best of its overloads."""
MODELS = frozenset(path.name for path in (Path(__file__).parent / "testing/models").glob("test_*"))
"""The files of model tests. Ids of tests outside of pytest's root folder name no other folder."""


@dataclass(frozen=True)
class NextStep:
    """An operator to write a rule for: how often it ran eagerly, and what helps."""

    op: str
    times: int
    reason: str
    hint: str


@dataclass(frozen=True)
class VendorReport:
    """What `vendor_report` found. Counts are by decision, or by outcome."""

    target: str
    core: Mapping[str, int]
    """Operators of core ATen."""
    public: Mapping[str, int]
    """Operators of PUBLIC; "missing": no installed library defines it."""
    listed: Mapping[str, int]
    """Overloads that dicp has rules for, in the family of the target."""
    tests: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[str] = ()
    steps: Sequence[NextStep] = ()
    """By gain: what ran eagerly most often first."""


def vendor_report(target: Target, files: Iterable[Path]) -> VendorReport:
    """How far a target is. Raises ResultsFileError for a file that pytest did not write."""
    tests: dict[str, str] = {}
    eager: Counter[tuple[str, str]] = Counter()
    for file in files:
        found = _results(file)
        tests |= found["tests"]
        for op, reasons in found["eager"].items():
            eager.update({(op, reason): number for reason, number in reasons.items()})
    shared = (GRAPH_RULES if isinstance(target, GraphTarget) else LOOP_RULES).ops()
    names = {str(op) for op in shared}
    rows = {row.op: row for row in operator_table(target)}
    core = set(map(str, core_overloads()))
    ruled: Counter[str] = Counter(target.rule_kind(op) or "no rule" for op in shared)
    models = {test: outcome for test, outcome in tests.items() if _is_model(test)}
    return VendorReport(
        target.name,
        Counter(row.decision for name, row in rows.items() if name in core),
        Counter(_decision(name, target) for name in PUBLIC),
        ruled,
        Counter(outcome for test, outcome in tests.items() if test not in models),
        Counter(models.values()),
        [test for test, outcome in tests.items() if outcome in ("failed", "error")],
        _steps(eager, rows, names),
    )


def _decision(name: str, target: Target) -> str:
    """The best decision on an operator's overloads; "missing" where no library defines it.

    Forms that write become the functional one, whose decision counts.
    """
    if name == "getitem":
        return "compiled"  # Python's, of what an operator with several results gives
    namespace, _, short = name.rpartition(".")
    ops = [op for op in overloads_of(namespace or "aten") if str(op).split(".")[1] == short]
    functional = [op for op in ops if not schema_of(op).is_mutable]
    found = {operator_row(op, target).decision for op in functional or ops}
    return min(found, key=BEST.index, default="missing")


def _steps(
    eager: Mapping[tuple[str, str], int], rows: Mapping[str, OperatorRow], shared: set[str]
) -> list[NextStep]:
    """What ran eagerly in tests, most often first; without tests, what has no rule."""
    counted = dict(eager) or {
        (row.op, row.reason): 0 for row in rows.values() if row.decision == "eager"
    }
    return [
        NextStep(op, times, reason, "dicp has a rule for it" if op in shared else "")
        for (op, reason), times in sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    ]


def _is_model(test: str) -> bool:
    return Path(test.partition("::")[0]).name in MODELS


def _results(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        if isinstance(found["tests"], dict) and isinstance(found["eager"], dict):
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsFileError(file, str(error) or type(error).__name__) from error
    raise ResultsFileError(file, "it has other contents")
