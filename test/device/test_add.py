"""The smoke test: `python -u test/device/test_add.py` registers the device and adds."""

import subprocess
import sys

ALONE = __name__ == "__main__"


def add() -> None:
    import torch

    import torch_dipu  # noqa: F401

    x = torch.randn(3, 4).cuda()
    y = torch.add(x, x)
    assert torch.equal(y.cpu(), x.cpu() + x.cpu())
    z = x.clone().add_(y)
    assert torch.equal(z.cpu(), x.cpu() + y.cpu())
    w = torch.add(3, x, alpha=2)
    torch.testing.assert_close(w.cpu(), 3 + 2 * x.cpu())
    assert x.is_cuda and str(x.device) == "cuda:0"
    print(y)
    print("added")


def test_alone() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "added"


if ALONE:
    add()
