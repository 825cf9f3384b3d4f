"""Which operator makes a training script's loss wrong: its set of eager operators is halved.

python -m dicp.op_tools.bisect SCRIPT [--metric loss] [--steps N] [--backend B] [-- ARGUMENTS]

Runs the script eager, compiled, and compiled in float64. If the compiled metric breaks the fp64
rule, half of the operators stay eager, then half of those that are left, until one is: at most
log2(operators) + 3 runs. Exit status: 0 they agree, 1 found, 2 not reproducible, 64 usage error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import torch

from dicp.compare import FLOOR_ULPS
from dicp.discovery import target_name
from dicp.errors import DicpError
from dicp.op_tools.records import timestamp
from dicp.op_tools.results import FOLDER, new_file, save_rows
from dicp.op_tools.script_run import KINDS, RunResult, RunSpec
from dicp.op_tools.tables import table

USAGE = 64
RESULTS = "op_bisect_result"
SOURCES = {
    "torch": "PyTorch's generator (seed it with torch.manual_seed)",
    "random": "Python's module random (seed it with random.seed)",
    "numpy.random": "numpy.random (seed it with numpy.random.seed)",
}
OTHER_SOURCE = (
    "none of the shared generators: a generator of the program's own, the time, os.urandom or the "
    "order of a set"
)
Runner = Callable[[RunSpec], RunResult]


class UsageError(Exception):
    """Nothing to bisect: the script, the metric or the backend is not as it must be."""


class NotReproducible(Exception):
    """Two runs of the script differ although they computed nothing yet; says by which source."""


@dataclass
class Finding:
    """The result of a bisection; `operator` is empty where the runs agree."""

    runs: int = 0
    operators: int = 0
    operator: str = ""
    kernel: str = ""
    line: str = ""
    error: float = 0.0
    eager_error: float = 0.0
    operator_error: float = 0.0
    """The error of the operator alone, on real inputs; 0 where it has none."""
    reproducer: str = ""
    others: tuple[str, ...] = ()
    """Operators that the runs could not tell from this one."""
    note: str = ""


def in_own_process(spec: RunSpec) -> RunResult:
    """Run the script in a process of its own. Raises UsageError if that dies."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "spec.json"), Path(folder, "result.json")
        given.write_text(json.dumps(asdict(spec)))
        command = [sys.executable, "-m", "dicp.op_tools.script_run", str(given), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            last = "\n".join(done.stderr.strip().splitlines()[-8:])
            raise UsageError(f"the script's process ended with {done.returncode}:\n{last}")
        return RunResult.of(json.loads(out.read_text()))


@dataclass
class Bisection:
    """Runs and verdicts of one script; `say` prints."""

    spec: RunSpec
    run_script: Runner
    say: Callable[[str], None]
    finding: Finding = field(default_factory=Finding)
    _decimals: int = 0

    def find(self) -> Finding:
        """Raises UsageError, NotReproducible."""
        eager = self._run("eager", replace(self.spec, mode="eager"))
        if eager.error:
            raise UsageError(f"the script fails when it runs eager: {eager.error}")
        self.spec = replace(self.spec, compiles_itself=eager.compiles_itself)
        compiled = self._run("compiled", replace(self.spec, mode="compiled"))
        if not compiled.compiled and not compiled.error:
            raise UsageError(f"the script compiles nothing with {self.spec.backend}")
        self.kind = self._kind(eager, compiled)
        self.eager = eager.series(self.kind, self.spec.steps)
        if not compiled.error and self._same(compiled):
            return self.finding
        check_reproducible(eager, compiled)
        wide = self._run("float64", replace(self.spec, mode="float64"))
        if wide.error:
            raise UsageError(f"the script fails in float64: {wide.error}")
        self.wide = wide.series(self.kind, self.spec.steps)
        self.judged = wide.judged
        self.finding.operators = len(self.judged.operators)
        if self._agrees(compiled):
            return self.finding
        self._halve(list(self.judged.operators))
        return self.finding

    # ---- verdicts -------------------------------------------------------------------------------

    def _kind(self, eager: RunResult, compiled: RunResult) -> str:
        for kind in KINDS:
            if eager.values.get(kind) and (compiled.values.get(kind) or compiled.error):
                return kind
        raise UsageError(
            f"the script shows no {self.spec.metric!r}: it assigns no variable of that name, and "
            "prints no number after it; name another with --metric"
        )

    def _floor(self, dtype: torch.dtype) -> float:
        """What rounding may change where eager happens to be exact; it grows with the steps."""
        scale = max((abs(v) for v in self.eager if math.isfinite(v)), default=0.0)
        floor = FLOOR_ULPS[dtype] * torch.finfo(dtype).eps * scale * len(self.eager)
        return floor + (0.5 * 10.0**-self._decimals if self.kind == "printed" else 0.0)

    def _same(self, run: RunResult) -> bool:
        """Whether a run's metric is eager's but for float32's rounding."""
        got = run.series(self.kind, self.spec.steps)
        return largest_error(got, self.eager) <= self._floor(torch.float32)

    def _agrees(self, run: RunResult) -> bool:
        """The fp64 rule on the whole series: error at most twice eager's own, plus a floor."""
        if run.error:
            self.say(f"  it raises {run.error}")
            return False
        error = largest_error(run.series(self.kind, self.spec.steps), self.wide)
        own = largest_error(self.eager, self.wide)
        narrowest = getattr(torch, self.judged.narrowest or "float32")
        ok = error <= 2 * own + self._floor(narrowest)
        self.say(f"  error {error:.3g}, eager's own {own:.3g}: {'agrees' if ok else 'differs'}")
        if not ok:
            self.finding.error, self.finding.eager_error = error, own
        return ok

    # ---- runs -----------------------------------------------------------------------------------

    def _run(self, name: str, spec: RunSpec) -> RunResult:
        self.finding.runs += 1
        result = self.run_script(spec)
        shown = next((result.values[k] for k in KINDS if result.values.get(k)), [])
        values = " ... ".join(f"{v:.6g}" for v in (shown[:1] + shown[-1:] if shown else []))
        self.say(f"run {self.finding.runs} {name}: {self.spec.metric} {values}")
        self._decimals = result.decimals
        return result

    def _halve(self, candidates: list[str]) -> None:
        """Invariant: with `eager` the metric is wrong, with `eager` and all candidates it is not.

        So the last candidate makes the difference, alone or with what it is fused with.
        """
        most = int(math.log2(len(candidates)) + 3) if candidates else 0
        eager: list[str] = []
        agreed = False
        while len(candidates) > 1 and self.finding.runs < most:
            half, rest = candidates[: len(candidates) // 2], candidates[len(candidates) // 2 :]
            name = f"with {len(eager) + len(half)} of {self.finding.operators} operators eager"
            patterns = tuple(map(re.escape, (*eager, *half)))
            run = self._run(name, replace(self.spec, mode="compiled", eager_ops=patterns))
            if self._agrees(run):
                candidates, agreed = half, True
            else:
                candidates, eager = rest, [*eager, *half]
        self._name(candidates, agreed)

    def _name(self, candidates: list[str], agreed: bool) -> None:
        if not candidates:
            self.finding.note = "the graphs hold no operators"
            return
        wrong = self.judged.wrong
        found = max(candidates, key=lambda op: wrong.get(op, 0.0))  # the first of equals
        finding = self.finding
        finding.operator = found
        finding.line = self.judged.operators[found]
        finding.operator_error = wrong.get(found, 0.0)
        if found not in wrong:
            finding.others = tuple(op for op in candidates if op != found)
        kernels = [name for name, ops in self.judged.kernels.items() if found in ops]
        captured = [name for name in (*kernels, found) if name in self.judged.captures]
        finding.kernel = next(iter(captured or kernels), "")
        if captured:
            script = Path(self.judged.captures[captured[0]]) / "reproduce.py"
            finding.reproducer = str(script)
        if not agreed and found not in wrong and len(self.judged.operators) > 1:
            finding.note = (
                "no set of eager operators agreed: the fault may lie outside of operators"
            )


def largest_error(got: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest difference; infinite where one series is shorter or not a number alone."""
    if len(got) != len(wanted):
        return math.inf
    errors = [0.0 if a == b or (a != a and b != b) else abs(a - b) for a, b in zip(
        got, wanted, strict=True)]  # fmt: skip
    return max((math.inf if e != e else e for e in errors), default=0.0)


def check_reproducible(one: RunResult, other: RunResult) -> None:
    """Raises NotReproducible if the runs were given different inputs, by a source that differs."""
    for number, (a, b) in enumerate(zip(one.entries, other.entries, strict=False)):
        drawn = [
            name for name in SOURCES if a.sources[name] not in (b.sources[name], one.start[name])
        ]
        if a.inputs == b.inputs and "torch" not in drawn:
            continue
        if not drawn and number:
            return  # later inputs may be results of earlier calls
        by = "; ".join(SOURCES[name] for name in drawn) or OTHER_SOURCE
        place = "the first call" if number == 0 else f"call {number + 1}"
        what = "gets other inputs or weights" if a.inputs != b.inputs else "draws other numbers"
        raise NotReproducible(f"{place} of the model {what} in a second run: {by}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.format_usage()}{self.prog}: {message}\n")
        raise SystemExit(USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m dicp.op_tools.bisect", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("--metric", default="loss", help="variable or printed name (loss)")
    parser.add_argument("--steps", type=int, default=20, help="values to compare (20)")
    parser.add_argument("--backend", default="dicp", help="a backend of dicp (dicp)")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of the script")
    return parser


def main(arguments: Sequence[str] | None = None, run: Runner = in_own_process) -> int:
    """Run the command line and return its exit status."""
    options = _parser().parse_args(arguments)
    folder = FOLDER / "bisect" / f"{os.getpid()}_{timestamp()}"
    spec = RunSpec(
        options.script, tuple(options.arguments), options.metric, options.steps, options.backend,
        folder=str(folder),
    )  # fmt: skip

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    try:
        _check(spec)
        finding = Bisection(spec, run, say).find()
    except (UsageError, DicpError, SyntaxError) as error:
        sys.stderr.write(f"bisect: {error}\n")
        return USAGE
    except NotReproducible as error:
        say(f"not reproducible: {error}")
        return 2
    if not finding.operator and not finding.note:
        say(f"bisect: {spec.metric} agrees after {finding.runs} runs")
        return 0
    rows = _rows(finding)
    say("\n".join(filter(None, (table(("found", "value"), rows), finding.note))))
    _save(spec, rows, say)
    return 1


def _check(spec: RunSpec) -> None:
    if not Path(spec.script).is_file():
        raise UsageError(f"there is no script {spec.script!r}")
    if spec.steps < 1:
        raise UsageError(f"--steps is {spec.steps}; expected a number above 0")
    if spec.backend != "dicp":
        target_name(spec.backend)


def _rows(finding: Finding) -> list[tuple[str, str]]:
    return [
        ("operator", " or ".join([finding.operator, *finding.others])),
        ("kernel", finding.kernel or "(an eager or library call)"),
        ("line", finding.line or "(unknown)"),
        ("error", f"{finding.error:.6g}, eager's own {finding.eager_error:.6g}"),
        ("operator alone", f"{finding.operator_error:.6g}" if finding.operator_error else "agrees"),
        ("reproducer", finding.reproducer or "(not captured)"),
        ("runs", f"{finding.runs} for {finding.operators} operators"),
    ]


def _save(spec: RunSpec, rows: Sequence[tuple[str, str]], say: Callable[[str], None]) -> None:
    """What was found as one row of a CSV file, which the report reads."""
    names, values = zip(("script", spec.script), ("backend", spec.backend), *rows, strict=True)
    path = new_file(FOLDER, RESULTS, "op_bisect_info")
    save_rows(path, names, [values], "op bisect result", say)


if __name__ == "__main__":
    sys.exit(main())
