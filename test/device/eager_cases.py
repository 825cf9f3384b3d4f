"""The operator cases of test/op, eager on the device: python eager_cases.py PART PARTS [NAME...]

Runs every case of its part (with names: of these files) with its inputs on the device, forward and
backward, against the CPU. Prints cases that differ, operators that ran on the CPU and why, in how
many cases none did, and in how many one that the target has a rule for.
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
from dicp.torch_private import pytree  # noqa: E402

FILES = sorted(path.stem for path in (ROOT / "test" / "op").glob("test_*.py"))


def moved(value, place):
    return pytree.tree_map(
        lambda leaf: leaf.to(place) if isinstance(leaf, torch.Tensor) else leaf, value
    )


def run(case, arguments, flags, place):
    """Results and gradients of a case, on the CPU."""
    given = moved(arguments, place)
    tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]
    wanted = []
    for tensor, flag in zip(tensors, flags, strict=False):
        if flag and tensor.is_floating_point():
            wanted.append(tensor.requires_grad_())
    with torch.device(place):
        result = case.fn(*given)
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    total = [t.double().sum() for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(sum(total), wanted, allow_unused=True) if total and wanted else ()
    return moved([t.detach() for t in leaves] + [g for g in grads if g is not None], "cpu")


def problem(case):
    """Why a case differs from the CPU; empty where it agrees."""
    variant = case.variants()[0]
    flags = case.grad_flags()
    try:
        expected = run(case, case.build(variant, {}), flags, "cpu")
    except Exception:
        return ""  # what the case is about fails eagerly too
    try:
        found = run(case, case.build(variant, {}), flags, "dipu")
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    if len(expected) != len(found):
        return f"{len(found)} results, expected {len(expected)}"
    for k, (a, b) in enumerate(zip(expected, found, strict=True)):
        try:
            torch.testing.assert_close(b, a, rtol=2e-3, atol=2e-3, equal_nan=True)
        except AssertionError as error:
            return f"result {k}: {' '.join(str(error).split())[:200]}"
    return ""


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
        cases += [(name, case) for case in getattr(module, "CASES", ()) if "rand" not in name]
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
