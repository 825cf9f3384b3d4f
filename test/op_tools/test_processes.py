"""The tools in two processes that train together, and in threads: what they write stays apart."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dicp import op_tools
from dicp.op_tools import one_iter

TRAIN = """\
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from dicp import op_tools

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).bfloat16()
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
data = torch.randn(8, 4).bfloat16()[rank::2]


def step():
    loss = parallel(data).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total


if sys.argv[2] == "tools":
    compare = op_tools.OpAutoCompare(quiet=True, rule="fp64")
    with op_tools.OpCapture(quiet=True), op_tools.OpTimeMeasure(quiet=True) as timer, compare:
        with op_tools.one_iter.record(parallel, optimizer, "recording"):
            step()
    assert not compare.failures, [r.operator for r in compare.failures]
    assert "torch.distributed.all_reduce" in {r.name for r in timer.results}
else:
    step()
total = step()
print("RESULT", os.getpid(), total.item(), *(p.float().sum().item() for p in model.parameters()))
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # PyTorch 2.13 aborts one process of 25 at the end, where threads of gloo are left
"""


def trained(mode: str) -> list[list[str]]:
    """What both ranks print: pid, loss and sums of weights."""
    Path("store").unlink(missing_ok=True)
    Path("train.py").write_text(TRAIN)
    ranks = [
        subprocess.Popen([sys.executable, "train.py", str(k), mode], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for k in range(2)
    ]  # fmt: skip
    found = []
    for process in ranks:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        found.append(next(line for line in out.splitlines() if line.startswith("RESULT")).split())
    return found


@pytest.mark.sweep
@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_two_processes_train_unchanged_and_write_apart() -> None:
    plain, looked_at = trained("plain"), trained("tools")
    assert [words[2:] for words in looked_at] == [words[2:] for words in plain]
    assert plain[0][2:] == plain[1][2:], "both ranks have the same weights"
    pids = {words[1] for words in looked_at}
    assert len(pids) == 2
    for result, first in (("op_autocompare_result", "op_autocompare_info"),
                          ("op_time_measure_result", "op_elasped_info")):  # fmt: skip
        files = list(Path("op_tools_results", result).iterdir())
        assert {f.name.split("_pid")[1].split("_")[0] for f in files} == pids, result
        for file in files:
            assert file.name.startswith(f"{first}_pid")
            names = [row[0] for row in csv.reader(file.open())]
            assert names.count(names[0]) == 1 and len(names) > 20, "one header, whole rows"
    captures = Path("op_tools_results/op_capture_results")
    assert {f.name for f in (captures / "torch.distributed.all_reduce").iterdir()} == pids
    for json_file in captures.rglob("*.json"):
        assert str(json.loads(json_file.read_text())["pid"]) in json_file.parts
    assert {f.name for f in Path("recording").iterdir()} == {"rank0", "rank1"}
    assert one_iter.main(["diff", "recording/rank0", "recording/rank1"]) == 1, "other data"


def test_a_forked_process_writes_what_it_does_itself() -> None:
    """OT-11"""
    timer = op_tools.OpTimeMeasure(["torch.add"], quiet=True).start()
    torch.add(torch.ones(2), 1)
    child = os.fork()
    if child == 0:
        torch.add(torch.ones(3), 1)
        timer.stop()
        os._exit(0)
    os.waitpid(child, 0)
    timer.stop()
    for pid, size in ((os.getpid(), 2), (child, 3)):
        (file,) = Path("op_tools_results/op_time_measure_result").glob(f"*_pid{pid}_*.csv")
        rows = list(csv.DictReader(file.open()))
        assert [row["input"] for row in rows] == [f"float32[{size}]"]


def test_threads_have_tools_of_their_own() -> None:
    barrier = threading.Barrier(2)
    found: dict[str, set[str]] = {}

    def work(name: str) -> None:
        tool = op_tools.OpAutoCompare(quiet=True)
        with tool:
            barrier.wait()
            for _ in range(20):
                getattr(torch, name)(torch.rand(5))
            barrier.wait()
        found[name] = {r.operator for r in tool.results}

    threads = [threading.Thread(target=work, args=(name,)) for name in ("sin", "cos")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"sin": {"torch.rand", "torch.sin"}, "cos": {"torch.rand", "torch.cos"}}


def test_backward_in_the_autograd_thread_has_its_forwards_id(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x = torch.ones(3, requires_grad=True)
    with op_tools.OpCapture(["torch.mul"]) as tool:
        y = torch.mul(x, 2)
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
    numbers = {path.parts[-3] for path in tool.saved}
    assert len(numbers) == 1
    assert {path.name for path in tool.saved} == {"input", "output", "grad_inputs", "grad_outputs"}
