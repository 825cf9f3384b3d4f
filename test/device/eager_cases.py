"""The operator cases of test/op, eager on the device: python eager_cases.py PART PARTS [NAME...]

Runs every case of its part (with names: of these files) with its inputs on the device, forward and
backward, against eager on the CPU by the case's rule. Prints cases that differ, operators that ran
on the CPU and why, in how many cases none did, and in how many one that the target has a rule for.
"""

import importlib
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
warnings.simplefilter("ignore")

import dicp.device.active as device  # noqa: E402
from dicp.testing.cases import created_on  # noqa: E402
from dicp.testing.evaluation import compare, copied, evaluate, in_float64  # noqa: E402
from dicp.torch_private import pytree  # noqa: E402

OF_THE_HOST = ("to_device_and_back",)
"""Cases whose device is the host, where a copy to it shares memory."""
FILES = sorted(path.stem for path in (ROOT / "test" / "op").glob("test_*.py"))


def problem(case):
    """How a case differs from eager on the CPU; empty where it agrees."""
    group, flags, call = case.build(case.variants()[0], {}), case.grad_flags(), case.all_variants()
    try:
        (eager,) = evaluate(call, [group], flags)
    except Exception:
        return ""  # what the case is about fails eagerly too
    truth = in_float64(call, [group], flags)
    torch.manual_seed(0)
    try:
        with created_on("dipu"):
            moved = pytree.tree_map(lambda value: copied(value, "dipu"), [group])
            (found,) = evaluate(call, moved, flags)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "; ".join(compare(found.on_host(), eager, truth[0] if truth else None, case.rule))


def on_cpu():
    """How often each operator ran on the CPU for want of another path."""
    return {name: n for (name, path), n in device.dipu.path_counts().items() if path == "cpu"}


def ruled(operator):
    """Whether the target has a rule for what an operator computes."""
    reason = device.registered.dispatcher.counts.reasons.get(operator, "")
    return "has no rule" not in reason and "no rule for this operator" not in reason


def main() -> None:
    part, parts, *names = sys.argv[1:]
    cases = []
    for name in names or FILES:
        module = importlib.import_module(f"test.op.{name}")
        cases += [
            (name, case)
            for case in getattr(module, "CASES", ())
            if "rand" not in name and case.name not in OF_THE_HOST
        ]
    cases = cases[int(part) :: int(parts)]
    device.registered.native.set_watching(True)  # so that every call is counted
    failed = alone = ruled_on_cpu = 0
    for name, case in cases:
        torch.manual_seed(0)
        before = on_cpu()
        text = problem(case)
        if text:
            failed += 1
            print(f"{name} {case.name}: {text}", flush=True)
        fell = sorted(op for op, n in on_cpu().items() if n > before.get(op, 0))
        alone += not fell
        ruled_on_cpu += any(map(ruled, fell))
        if fell:
            print(f"{name} {case.name} on the cpu: {' '.join(fell)}", flush=True)
    reasons = device.registered.dispatcher.counts.reasons
    for name in sorted(on_cpu()):
        print(f"cpu: {name}: {reasons.get(name, '')[:160]}")
    print(
        f"CASES {len(cases)} failed {failed} on the device alone {alone} "
        f"operators with a rule on the CPU in {ruled_on_cpu}"
    )


if __name__ == "__main__":
    main()
