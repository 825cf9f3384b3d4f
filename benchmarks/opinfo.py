"""PyTorch's operator database (OpInfo) through `torch.compile`, per backend and dtype.

    python -m benchmarks.opinfo --backends cpugraph --samples 3
    python -m benchmarks.opinfo --backends inductor --samples 1 --output inductor.json
    python -m benchmarks.opinfo --backends cpugraph --baseline inductor.json

Every operator of `op_db` is compiled on a few of its sample inputs, forward and (float dtypes)
gradients, and compared with eager under the fp64 rule: at most twice eager's own error plus a
floor. Each operator runs in a worker process under a time limit; a worker that dies or hangs marks
its operator as crashed or timed out, and the run goes on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import platform
import queue
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

FLOOR_ULPS = {torch.float64: 256.0, torch.float32: 16.0, torch.float16: 2.0, torch.bfloat16: 2.0}
UNDEFINED_VALUES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
SAMPLES_LOOKED_AT = 40
TASKS_PER_WORKER = 40
READY = "ready"


@dataclass(frozen=True)
class Task:
    """One operator on one backend in one dtype; `index` counts in `op_db`."""

    index: int
    name: str
    backend: str
    dtype: str
    samples: int


@dataclass
class Outcome:
    """The outcome of a task: pass, fail, skip, crash or timeout, and why.

    `graphs` counts the graphs that Dynamo passed to the backend over all samples: with none, the
    operator ran as in eager and its pass means nothing.
    """

    name: str
    status: str
    cause: str = ""
    detail: str = ""
    samples: int = 0
    graphs: int = 0
    seconds: float = 0.0


@dataclass
class Report:
    machine: dict[str, str]
    samples: int
    results: dict[str, dict[str, list[Outcome]]] = field(default_factory=dict)

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def outcomes_from_json(path: Path) -> dict[str, dict[str, list[Outcome]]]:
    data = json.loads(path.read_text())
    return {
        backend: {dtype: [Outcome(**row) for row in rows] for dtype, rows in by_dtype.items()}
        for backend, by_dtype in data["results"].items()
    }


# ---- inside a worker ---------------------------------------------------------------------------


def values_differ(got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor | None) -> str:
    """Why `got` is not an acceptable result, or an empty string."""
    for what in ("shape", "dtype", "layout"):
        if getattr(got, what) != getattr(eager, what):
            return f"{what} {getattr(got, what)}, eager {getattr(eager, what)}"
    if got.layout is not torch.strided:
        return values_differ(got.to_dense(), eager.to_dense(), None)
    got, eager = (
        got.detach().resolve_conj().resolve_neg(),
        eager.detach().resolve_conj().resolve_neg(),
    )
    if got.is_complex():
        truth = (
            None if truth is None else torch.view_as_real(truth.resolve_conj().to(torch.cdouble))
        )
        got, eager = torch.view_as_real(got), torch.view_as_real(eager)
    if not got.is_floating_point():
        return "" if torch.equal(got, eager) else f"{int((got != eager).sum())} elements differ"
    real = (
        eager.double() if truth is None or truth.shape != eager.shape else truth.detach().double()
    )
    odd = (got.isfinite() != eager.isfinite()) & (got.isfinite() != real.to(got.dtype).isfinite())
    odd |= (got.isinf() & eager.isinf() & (got != eager)) | (got.isnan() & eager.isinf())
    if odd.any():
        return f"NaN or infinity differs in {int(odd.sum())} elements"
    finite = got.isfinite() & eager.isfinite() & real.isfinite()
    if not finite.any():
        return ""
    mine, theirs, real = got[finite].double(), eager[finite].double(), real[finite]
    floor = FLOOR_ULPS[got.dtype] * torch.finfo(got.dtype).eps
    largest = real.abs().max()
    allowed = 2 * (theirs - real).abs().max() + floor * largest + torch.finfo(got.dtype).tiny
    error = (mine - real).abs().max()
    return (
        "" if error <= allowed else f"error {error:.3g}, allowed {allowed:.3g} (max {largest:.3g})"
    )


def copy_inputs(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A deep copy that keeps leaves leaves, optionally with floating tensors in another dtype."""

    def one(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        result = item.detach().clone()
        if dtype is not None and result.is_floating_point():
            result = result.to(dtype)
        elif dtype is not None and result.is_complex():
            result = result.to(torch.cdouble)
        return result.requires_grad_(item.requires_grad)

    return pytree.tree_map(one, value)


def differentiable(outputs: Any) -> list[torch.Tensor]:
    return [
        v
        for v in pytree.tree_leaves(outputs)
        if isinstance(v, torch.Tensor) and v.requires_grad and v.layout is torch.strided
    ]


def call_with_gradients(
    fn: Callable[..., Any], sample: Any, dtype: torch.dtype | None = None
) -> tuple[list[Any], list[Any]]:
    """Flat outputs and gradients of `fn` on a copy of a sample, always from the same seed."""
    arguments, keywords = copy_inputs(((sample.input, *sample.args), sample.kwargs), dtype)
    torch.manual_seed(0)
    outputs = fn(*arguments, **keywords)
    flat = pytree.tree_leaves(outputs)
    leaves = [
        v
        for v in pytree.tree_leaves((arguments, keywords))
        if isinstance(v, torch.Tensor) and v.requires_grad
    ]
    roots = differentiable(sample.output_process_fn_grad(outputs)) if leaves else []
    if not roots:
        return flat, []
    gen = torch.Generator().manual_seed(1)

    def cotangent(root: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(root.shape, generator=gen, dtype=torch.float32)
        return noise.to(root.dtype)

    grads = torch.autograd.grad(roots, leaves, [cotangent(r) for r in roots], allow_unused=True)
    return flat, list(grads)


def compare_flat(kind: str, got: list[Any], eager: list[Any], truth: list[Any] | None) -> str:
    if len(got) != len(eager):
        return f"{len(got)} {kind}s, eager {len(eager)}"
    for i, (mine, theirs) in enumerate(zip(got, eager, strict=True)):
        real = truth[i] if truth is not None and len(truth) == len(eager) else None
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            why = values_differ(mine, theirs, real if isinstance(real, torch.Tensor) else None)
            if why:
                return f"wrong {kind} {i}: {why}"
        elif (mine is None) != (theirs is None):
            present = theirs if mine is None else mine
            if isinstance(present, torch.Tensor) and present.any():
                return f"{kind} {i} is {type(mine).__name__}, eager {type(theirs).__name__}"
    return ""


def options_for(backend: str) -> dict[str, Any]:
    """Random numbers as eager draws them, so that random operators can be compared too."""
    if backend == "inductor":
        # Only whether it passes matters here, so its compile time is kept low.
        return {"fallback_random": True, "cpp.simdlen": 1, "compile_threads": 1}
    registered_by_dicp = backend not in ("aot_eager", "eager", "aot_eager_decomp_partition")
    return {"fallback_random": True} if registered_by_dicp else {}


def run_sample(op: Any, sample: Any, backend: str) -> tuple[str, str]:
    """(status, why) of one sample: pass, fail or skip."""
    fn = op.get_op()
    try:
        eager = call_with_gradients(fn, sample)
    except Exception as error:
        return "skip", f"eager: {type(error).__name__}: {error}"
    try:
        truth: Any = call_with_gradients(fn, sample, torch.float64)
    except Exception:
        truth = (None, None)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a, **k: fn(*a, **k), backend=backend, dynamic=False, options=options_for(backend)
    )
    got = call_with_gradients(compiled, sample)
    if op.name in UNDEFINED_VALUES:
        same = [g.shape for g in got[0]] == [e.shape for e in eager[0]]
        return ("pass", "") if same else ("fail", "wrong shape")
    for kind, mine, theirs, real in (
        ("output", got[0], eager[0], truth[0]),
        ("gradient", got[1], eager[1], truth[1]),
    ):
        why = compare_flat(kind, mine, theirs, real)
        if why:
            return "fail", why
    return "pass", ""


def spread(items: Iterable[Any], count: int) -> list[Any]:
    """`count` items, evenly spread over the first SAMPLES_LOOKED_AT."""
    found = list(itertools.islice(items, SAMPLES_LOOKED_AT))
    if len(found) <= count:
        return found
    if count == 1:
        return found[:1]
    return [found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)]


def run_task(op_db: Sequence[Any], task: Task) -> Outcome:
    op = op_db[task.index]
    dtype = getattr(torch, task.dtype)
    outcome = Outcome(task.name, "skip", cause="dtype not supported by eager")
    if dtype not in op.supported_dtypes("cpu"):
        return outcome
    wants_grad = dtype.is_floating_point and dtype is torch.float32 and op.supports_autograd
    torch.manual_seed(0)
    try:
        samples = spread(op.sample_inputs("cpu", dtype, requires_grad=wants_grad), task.samples)
    except Exception as error:
        outcome.cause = f"no samples: {type(error).__name__}"
        return outcome
    statuses = []
    counters.clear()
    for sample in samples:
        try:
            status, why = run_sample(op, sample, task.backend)
        except Exception as error:
            status, why = "fail", f"{type(error).__name__}: {error}"
        statuses.append(status)
        if status == "fail":
            cause = shorten(why)
            return Outcome(task.name, "fail", cause, why[:3000], len(samples), graph_count())
    kind = "pass" if "pass" in statuses else "skip"
    cause = "" if kind == "pass" else "eager fails"
    return Outcome(task.name, kind, cause, "", len(samples), graph_count())


def graph_count() -> int:
    return int(counters["stats"]["unique_graphs"])


def shorten(why: str) -> str:
    """The first informative line of an error, numbers and addresses removed, to group failures
    by."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if text.startswith("BackendCompilerFailed") and len(lines) > 1:
        text = lines[1]
    return re.sub(r"0x[0-9a-f]+|\d+\.?\d*(e[-+]?\d+)?", "N", text)[:160]


def worker_main() -> None:
    """Read tasks as JSON lines from stdin, answer each with one JSON line on the real stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever an operator prints goes to stderr
    torch.set_num_threads(1)
    from torch.testing._internal import common_methods_invocations as database

    # Random operators seed themselves there, which Dynamo does not compile; call_with_gradients
    # seeds instead.
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    answers.write(json.dumps(READY) + "\n")
    for line in sys.stdin:
        task = Task(**json.loads(line))
        started = time.perf_counter()
        outcome = run_task(database.op_db, task)
        outcome.seconds = round(time.perf_counter() - started, 2)
        answers.write(json.dumps(asdict(outcome)) + "\n")


# ---- the coordinator ---------------------------------------------------------------------------


class Worker:
    """A worker process; `run` answers within the limit or says how the process died."""

    def __init__(self, log: Path | None) -> None:
        self.log = log
        self.process: subprocess.Popen[str] | None = None
        self.done = 0

    def _start(self) -> subprocess.Popen[str]:
        errors = self.log.open("a") if self.log else subprocess.DEVNULL
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.opinfo", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
        )
        self.done = 0
        if self._read(300.0) is None:
            raise RuntimeError("an OpInfo worker does not start; see --log")
        return self.process

    def _read(self, seconds: float) -> Any:
        """The next answer, or None where there is none in time or the process is gone."""
        assert self.process is not None and self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        return json.loads(line) if line else None

    def run(self, task: Task, limit: float) -> Outcome:
        if self.done >= TASKS_PER_WORKER:
            self.stop()
        process = self.process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(task)) + "\n")
        answer = self._read(limit)
        self.done += 1
        if answer is not None:
            return Outcome(**answer)
        status = "timeout" if process.poll() is None else "crash"
        code = "" if status == "timeout" else f" with code {process.wait()}"
        self.stop()
        return Outcome(task.name, status, cause=status + code, seconds=limit)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def all_tasks(options: argparse.Namespace) -> list[Task]:
    from torch.testing._internal.common_methods_invocations import op_db

    wanted = re.compile(options.ops)
    return [
        Task(index, full_name(op), backend, dtype, options.samples)
        for backend in options.backends
        for dtype in options.dtypes
        for index, op in enumerate(op_db)
        if wanted.search(full_name(op))
    ]


def run_all(tasks: list[Task], options: argparse.Namespace) -> Report:
    """Run every task, `options.workers` at a time, saving the report as it grows."""
    machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
    report = Report(machine, options.samples)
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for _ in range(options.workers):
        idle.put(Worker(options.log))

    def work(task: Task) -> Outcome:
        worker = idle.get()
        try:
            return worker.run(task, options.timeout)
        finally:
            idle.put(worker)

    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for number, (task, outcome) in enumerate(zip(tasks, pool.map(work, tasks), strict=True), 1):
            report.results.setdefault(task.backend, {}).setdefault(task.dtype, []).append(outcome)
            if outcome.status not in ("pass", "skip"):
                print(f"{task.backend} {task.dtype} {task.name}: {outcome.cause}", flush=True)
            if number % 20 == 0 or number == len(tasks):
                elapsed = time.perf_counter() - started
                print(f"-- {number}/{len(tasks)} in {elapsed:.0f} s", flush=True)
                options.output.write_text(report.as_json())
    while not idle.empty():
        idle.get().stop()
    return report


def summary(results: dict[str, dict[str, list[Outcome]]], baseline: str | None = "inductor") -> str:
    """Pass rates, then what the baseline passes and another backend does not, by cause."""
    lines = [
        f"{'backend':<14}{'dtype':<10}{'pass':>6}{'fail':>6}{'crash':>6}{'skip':>6}{'rate':>8}"
    ]
    for backend, by_dtype in results.items():
        for dtype, rows in by_dtype.items():
            counts = Counter(row.status for row in rows)
            failed = counts["fail"]
            dead = counts["crash"] + counts["timeout"]
            ran = counts["pass"] + failed + dead
            rate = f"{100 * counts['pass'] / ran:.1f}%" if ran else "-"
            lines.append(
                f"{backend:<14}{dtype:<10}{counts['pass']:>6}{failed:>6}{dead:>6}"
                f"{counts['skip']:>6}{rate:>8}"
            )
    base = results.get(baseline or "", {})
    for backend, by_dtype in results.items():
        if backend == baseline:
            continue
        for dtype, rows in by_dtype.items():
            lines += _compared(backend, dtype, rows, base.get(dtype))
    return "\n".join(lines)


def _compared(
    backend: str, dtype: str, rows: list[Outcome], base: list[Outcome] | None
) -> list[str]:
    passed = {row.name for row in base if row.status == "pass"} if base else None
    mine = {row.name: row for row in rows}
    common = [name for name in mine if passed is None or name in passed]
    bad = [mine[name] for name in common if mine[name].status not in ("pass", "skip")]
    lines = [""]
    if passed is not None and common:
        good = sum(mine[name].status == "pass" for name in common)
        lines.append(
            f"{backend} {dtype}: {good} of the {len(common)} operators that the baseline passes"
            f" ({100 * good / len(common):.2f}%)"
        )
    unseen = [name for name in common if mine[name].status == "pass" and not mine[name].graphs]
    if unseen:
        lines.append(
            f"{backend} {dtype}: {len(unseen)} of these never reach the backend, Dynamo leaves them"
            f" to eager: {', '.join(unseen)}"
        )
    lines.append(f"{backend} {dtype}: failures by cause")
    by_cause: dict[str, list[str]] = {}
    for row in bad:
        by_cause.setdefault(row.cause, []).append(row.name)
    for cause, names in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {len(names):>4}  {cause}")
        lines.append(f"        {', '.join(names)}")
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.opinfo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backends", type=names, default=["cpugraph"])
    parser.add_argument(
        "--dtypes", type=names, default=["float32"], help="gradients are compared in float32 only"
    )
    parser.add_argument("--samples", type=int, default=3, help="sample inputs per operator")
    parser.add_argument("--ops", default="", help="only operators whose name matches this regex")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per operator")
    parser.add_argument("--output", type=Path, default=Path("opinfo.json"))
    parser.add_argument("--log", type=Path, default=None, help="where the workers' stderr goes")
    parser.add_argument(
        "--baseline",
        type=Path,
        default=None,
        help="an earlier report whose backends join the summary",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        worker_main()
        return 0
    report = run_all(all_tasks(options), options)
    results = dict(outcomes_from_json(options.baseline)) if options.baseline else {}
    results.update(report.results)
    print(summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
