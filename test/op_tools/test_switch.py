"""`import ditorch`: no device at hand, nothing replaced on request, the outermost call compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.forked import COMPILER, TORCH, server

NOTHING_REPLACED = """
import torch
before = torch.Tensor.cuda, torch.cuda.is_available, torch.nn.Module.__call__
import ditorch
assert before == (torch.Tensor.cuda, torch.cuda.is_available, torch.nn.Module.__call__)
assert ditorch.framework == "torch" and not torch.cuda.is_available()
"""
NO_DEVICE = """
import sys, warnings
import torch
sys.modules["dicp.device"] = None  # importing it fails
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import ditorch
texts = [str(w.message) for w in caught if "ditorch" in str(w.message)]
assert len(texts) == 1 and texts[0].startswith("ditorch found no device, the CPU stays"), texts
assert torch.ones(2).sum() == 2 and ditorch.framework == "torch"
"""
COMPILED = """
import threading
import torch
plain = torch.nn.Module.__call__
import ditorch
from torch._dynamo.utils import counters
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
x = torch.randn(2, 3)
assert torch.allclose(model(x), torch.relu(x @ model[0].weight.T + model[0].bias), atol=1e-6)
assert counters["stats"]["unique_graphs"] == 1, "the outermost module as one graph"
found = []
thread = threading.Thread(target=lambda: found.append(model(x)))
thread.start()
thread.join()
assert torch.equal(found[0], model(x))
ditorch.undo()
assert torch.nn.Module.__call__ is plain
"""


def run(program: str, imported: tuple[str, ...] = COMPILER, **variables: str) -> str:
    environment = {**os.environ, **variables}
    return server(*imported).run(["-c", program], env=environment, check=True).stdout


def test_nothing_is_replaced_on_request() -> None:
    line = run(NOTHING_REPLACED, DITORCH_DISABLE_MOCK="1")
    assert re.fullmatch(r"ditorch: \S+ torch:\S+ pid: \d+\n", line)


def test_no_device_is_one_warning_and_the_cpu_stays() -> None:
    run(NO_DEVICE, DITORCH_DISABLE_MOCK="0")


def test_the_outermost_call_is_compiled_and_undo_restores_it() -> None:
    run(COMPILED, DITORCH_DISABLE_MOCK="1", DITORCH_COMPILE="1")


NAMED = """
import warnings
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import ditorch
texts = [str(w.message) for w in caught if "ditorch found no device" in str(w.message)]
assert texts == [] or "'nonsense'" in texts[0], texts
assert ditorch.framework == "torch" and not torch.cuda.is_available()
print(len(texts))
"""


def test_the_device_of_the_variable_is_taken_or_missed() -> None:
    """OT-31 and the table of errors: no other device in place of the one that is asked for."""
    assert run(NAMED, DITORCH_DEVICE="cpu").splitlines()[-1] == "0"
    assert run(NAMED, DITORCH_DEVICE="nonsense").splitlines()[-1] == "1"
    assert run(NAMED, DIPU_DEVICE="nonsense").splitlines()[-1] == "1"


PLUGIN = """
import torch
before = torch.Tensor.cuda, torch.cuda.is_available
import ditorch
assert ditorch.framework == "torch_npu" and ditorch.switched.version == "2.13", ditorch.framework
assert torch.cuda.is_available() and torch.ones(2).cuda() == "moved"
ditorch.undo()
assert before == (torch.Tensor.cuda, torch.cuda.is_available)
"""
BROKEN = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import ditorch
(text,) = [str(w.message) for w in caught if "ditorch" in str(w.message)]
assert text == "ditorch cannot use the plugin torch_npu: OSError: no driver", text
assert ditorch.framework == "torch"
"""


def test_a_plugin_of_a_vendor_comes_first(tmp_path: Path) -> None:
    """OT-31: it is found without an entry point, and its own module replaces the names."""
    package = tmp_path / "torch_npu"
    (package / "contrib" / "transfer_to_npu").mkdir(parents=True)
    (package / "contrib" / "__init__.py").touch()
    (package / "__init__.py").write_text("__version__ = '2.13'\n")
    (package / "contrib" / "transfer_to_npu" / "__init__.py").write_text(
        "import torch\ntorch.cuda.is_available = lambda: True\n"
        "torch.Tensor.cuda = lambda self, *args, **kwargs: 'moved'\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run(PLUGIN, PYTHONPATH=path)
    (package / "__init__.py").write_text("raise OSError('no driver')\n")
    run(BROKEN, PYTHONPATH=path, DITORCH_DISABLE_MOCK="1")


NO_TARGET = """
import sys
import torch
import ditorch
targets = [name for name in sys.modules if name.startswith(("dicp.vendor.", "outsider"))]
assert not targets and "sympy" not in sys.modules, targets
print(ditorch.framework, torch.ones(2).cuda())
"""


def test_asking_for_dicp_s_logs_switches_nothing() -> None:
    """PyTorch imports the packages of a project that TORCH_LOGS names."""
    env = {**os.environ, "TORCH_LOGS": "dicp"}
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.device('cuda').type)"],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "cuda\n" and "DIPU" not in done.stderr


def test_importing_it_imports_no_target(tmp_path: Path) -> None:
    """Not even that of an installed vendor, whose file names the plugin that is then taken."""
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    for module in ("outsider", "outsider.target"):
        files = {
            "outsider/__init__.py": "",
            "outsider/target.py": "",
            "outsider/pytorch_plugin.json": '{"module": "out_plugin", "migration": "out_moved"}',
            "outsider-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: outsider\nVersion: 1\n",
            "outsider-1.dist-info/entry_points.txt": f"[dicp.targets]\nout = {module}:Target\n",
            "out_plugin.py": "",
            "out_moved.py": "import torch\ntorch.Tensor.cuda = lambda self: 'moved'\n",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        printed = run(NO_TARGET, TORCH, PYTHONPATH=path, DITORCH_DISABLE_MOCK="0")
        assert printed.splitlines()[-1] == "out_plugin moved"
    (tmp_path / "out_plugin.py").unlink()
    printed = run(NO_TARGET, TORCH, PYTHONPATH=path, DITORCH_DISABLE_MOCK="0")
    assert printed.splitlines()[-1].startswith("torch_dipu ")
    (tmp_path / "outsider" / "pytorch_plugin.json").write_text("[]")
    program = f"import warnings\nwarnings.simplefilter('error')\n{NO_TARGET}"
    broken = server(*TORCH).run(
        ["-c", program], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert "cannot read pytorch_plugin.json of the target out: TypeError" in broken.stderr
