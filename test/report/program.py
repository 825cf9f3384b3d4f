"""What the report's tests run: two graphs with gradients, an eager call, results of tools."""

import sys

import torch
from torch import Tensor, nn

from dicp import op_tools
from dicp.op_tools.bisect import RESULTS as BISECTIONS
from dicp.op_tools.module_compare import COLUMNS as MODULE_COLUMNS
from dicp.op_tools.one_iter import RESULTS as MODULES
from dicp.op_tools.results import append_csv
from dicp.op_tools.verdict import COLUMNS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.down(nn.functional.gelu(self.up(y)))
        torch._dynamo.graph_break()
        values = torch.linalg.svdvals(y.detach())
        return torch.softmax(x + y, -1) * values.sum()


if __name__ == "__main__":
    torch.manual_seed(0)
    print("the script printed this")
    result = torch.compile(Block(), backend=sys.argv[1])(torch.randn(16, 32))
    result.square().mean().backward()
    file = op_tools.OpAutoCompare().folder / "op_autocompare_result" / "planted.csv"
    row = ("1/now", "planted.kernel output", False, 0.5, 1.0, 1.0, 1e-5, 1e-5, "")
    append_csv(file, ("forward_id", *COLUMNS), [row])
    found = {"script": "train.py", "operator": "aten.planted.default", "line": "train.py:7"}
    append_csv(file.parents[1] / BISECTIONS / "planted.csv", [*found], [[*found.values()]])
    row = ("planted.block", "0/1", "output[0]", 0.5, 1.0, "wrong", "")
    append_csv(file.parents[1] / MODULES / "planted.csv", MODULE_COLUMNS, [row])
    with op_tools.OpOverflowCheck(only_bad=True):
        torch.ones(2) / torch.zeros(2)
