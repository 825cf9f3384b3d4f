"""Each error's exact message; errors survive pickling, as worker processes hand them back."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from dicp import errors
from dicp.errors import (
    AdaptorFileError,
    CacheFolderError,
    CaptureFormatError,
    CaseError,
    CaseFileError,
    CollectiveError,
    CompilerError,
    ConfigValueError,
    ConformanceConfigError,
    DeviceError,
    DeviceMemoryError,
    DeviceMovedError,
    DeviceRegistrationError,
    DicpError,
    DicpWarning,
    DumpFolderError,
    FamilyNameError,
    FamilyPackageError,
    GgufFileError,
    GraphRejectedError,
    HostMemoryError,
    IndexOutOfBoundsError,
    InferenceMismatchError,
    InputLayoutError,
    InputMismatchError,
    IntegerDivisionByZeroError,
    InvalidTargetError,
    LaunchError,
    MissingPackageError,
    ModelMismatchError,
    NarrowingError,
    NewVendorError,
    OldDeviceConfigError,
    OperatorLibraryError,
    OperatorNameError,
    OverflowFoundError,
    PrototypeError,
    RecordedScriptError,
    RecordingMismatchError,
    ReferenceDataError,
    ReportOutputError,
    ReportScriptError,
    ReportSourceError,
    ResultMismatchError,
    ResultsFileError,
    RuleError,
    RunFailureError,
    RunStatusError,
    RuntimeLibraryError,
    SemanticsError,
    SimulatorForbiddenError,
    SizeMismatchError,
    TargetFailureError,
    TargetNotFoundError,
    TestFileError,
    ToolchainError,
    ToolVariableError,
    UnknownFeatureError,
    UnknownOptionError,
    UnsupportedOperatorError,
    VendorNotFoundError,
)

CASES: list[tuple[DicpError, str]] = [
    (
        AdaptorFileError(Path("convert_config.yaml"), 3, "unknown dtype 'int33'"),
        "convert_config.yaml:3: unknown dtype 'int33'. docs/adding_a_vendor.md describes the file; "
        "DICP_CONVERT_CONFIG (option convert_config) names another one.",
    ),
    (
        NarrowingError("add.Tensor", 2**31, "torch.int32"),
        "add.Tensor: 2147483648 does not fit torch.int32, to which the target's adaptor file "
        "casts. `allow_narrowing: True` in the file lets such numbers wrap around; eager_ops='add' "
        "keeps the operator's own type.",
    ),
    (
        DeviceRegistrationError("PrivateUse1 is named 'other' already", "Import one of them"),
        "the eager device cannot be registered: PrivateUse1 is named 'other' already. Import one "
        "of them.",
    ),
    (
        CollectiveError("dicp_rt_broadcast", 1, 4, 7, "the link is down"),
        "dicl: dicp_rt_broadcast failed on rank 1 of 4 with status 7: the link is down. "
        "The other ranks may wait for this one; end all processes and start them again.",
    ),
    (
        RuntimeLibraryError("libfoo.so", ["dicp_rt_fill", "dicp_rt_free"]),
        "libfoo.so lacks functions of the device runtime interface: dicp_rt_fill, dicp_rt_free. "
        "dicp/device/native/runtime.h declares them, the collectives as all or none; "
        "`python -m dicp device check` tests a library against it.",
    ),
    (
        ReportSourceError(Path("plots"), "it holds no compiled graph"),
        "no report of 'plots': it holds no compiled graph. Give a Python script that uses a "
        "backend of dicp, or a folder that DICP_DUMP=<folder> wrote (with DICP_DUMP_TIMES=1 for "
        "times).",
    ),
    (
        RecordedScriptError("train.py", "there is no file 'train.py'"),
        "cannot record 'train.py': there is no file 'train.py'. It has to be `python FILE ...` or "
        "`python -m MODULE ...`, and to end with status 0 by itself.",
    ),
    (
        ReportScriptError(Path("train.py"), 1, "Traceback\nValueError: x\n"),
        "no report: 'train.py' ended with exit status 1.\nits last lines on stderr:\n"
        "  Traceback\n  ValueError: x\nFix the script, or run it by itself with "
        "DICP_DUMP=<folder> and give that.",
    ),
    (
        ReportOutputError(Path("/none/page.html"), "No such file or directory"),
        "the report cannot be written to '/none/page.html': No such file or directory. Give "
        "another file by --out.",
    ),
    (
        VendorNotFoundError("droplit", ["droplet"]),
        "The device asked for (DITORCH_DEVICE, DIPU_DEVICE) is 'droplit', and no installed package "
        "registers a runtime of that name. "
        "Did you mean 'droplet'? Installed: droplet. A runtime is registered by an entry point in "
        "the group 'dicp.devices'; unset the variable for the simulated chip.",
    ),
    (
        OperatorLibraryError("/chip/liboperators.so", "it has none of diopiAdd, diopiMm"),
        "The operator library /chip/liboperators.so: it has none of diopiAdd, diopiMm. "
        "DIPU_WITH_DIOPI_LIBRARY=DISABLE runs without it; dicp/device/native/operator_library.h "
        "declares what such a library is given.",
    ),
    (
        RunFailureError("chip", "graph g0", "KeyError: 'x'", "chip/run.py:7", ["relu at a.py:3"]),
        "target 'chip': the run of graph g0 raises KeyError: 'x', at chip/run.py:7.\n"
        "compiled from:\n  relu at a.py:3\nFix the target there, or report it; until then "
        "eager_ops (DICP_EAGER_OPS) runs these operators eagerly.",
    ),
    (
        RunStatusError("chip", "relu_12", None, "0", ["aten.relu.default (relu) at a.py:3"]),
        "target 'chip': the run of relu_12 gave status None, not 0.\ncompiled from:\n"
        "  aten.relu.default (relu) at a.py:3\nIts results cannot be trusted. The device may have "
        "refused the launch, or the target's run returns no status: see `python -m dicp doctor` "
        "and docs/adding_a_vendor.md.",
    ),
    (
        RuleError(
            "aten.relu.default",
            ["torch.float32"],
            [(2, 3)],
            "chip",
            "a.py:3",
            "raises KeyError: 'x'",
            place="chip/rules.py:7",
        ),
        "target 'chip': the rule for aten.relu.default(torch.float32[2, 3]) raises KeyError: 'x'. "
        "At: a.py:3. Fix the rule at chip/rules.py:7, or report it; until then "
        "eager_ops='aten.relu.default' "
        "(DICP_EAGER_OPS) runs the operator eagerly.",
    ),
    (
        RuleError(
            "aten.relu.default",
            [],
            [],
            "chip",
            "",
            "raises KeyError: 'x'",
            culprits="the meaning of Relu, or the rule",
        ),
        "target 'chip': the rule for aten.relu.default() raises KeyError: 'x'. Fix the meaning of "
        "Relu, or the rule, or report it; until then eager_ops='aten.relu.default' "
        "(DICP_EAGER_OPS) runs the operator eagerly.",
    ),
    (
        SemanticsError("Relu", "raises KeyError: 'x'", "chip/operators.py:7"),
        "graph operator Relu: its meaning raises KeyError: 'x'. Fix the meaning of Relu at "
        "chip/operators.py:7 or the operator's prototype, or report it; until then "
        "on_compile_error='eager' (DICP_ON_COMPILE_ERROR) runs the model eagerly.",
    ),
    (
        TargetFailureError("chip", "render_kernel", "raises KeyError: 'x'", "chip/kernel.py:7"),
        "target 'chip': render_kernel raises KeyError: 'x', at chip/kernel.py:7. Fix the target "
        "there, or report it; until then on_compile_error='eager' (DICP_ON_COMPILE_ERROR) runs "
        "the model eagerly.",
    ),
    (
        TargetFailureError(
            "chip",
            "render_graph",
            "raises KeyError: 'x'",
            "chip/code.py:7",
            ["aten.relu at a.py:3"],
        ),
        "target 'chip': render_graph raises KeyError: 'x', at chip/code.py:7.\ncompiled from:\n"
        "  aten.relu at a.py:3\nFix the target there, or report it; until then "
        "on_compile_error='eager' (DICP_ON_COMPILE_ERROR) runs the model eagerly.",
    ),
    (
        NewVendorError("cpu", "is a target already"),
        "vendor 'cpu' is a target already. For example: "
        "python -m dicp new-vendor mychip --family loop --package mychip",
    ),
    (
        ResultsFileError(Path("a.json"), "it is no JSON"),
        "'a.json' holds no results of tests: it is no JSON. `pytest --results FILE` writes them.",
    ),
    (
        UnknownOptionError("cahce", ["fuse", "cache"]),
        "unknown option 'cahce'. Did you mean 'cache'? Valid options: cache, fuse. "
        "`python -m dicp config` describes each.",
    ),
    (
        UnknownOptionError("zzz", ["fuse", "cache"]),
        "unknown option 'zzz'. Valid options: cache, fuse. `python -m dicp config` describes each.",
    ),
    (
        UnknownFeatureError("autocompar", ["autocompare", "fallback"]),
        "no operator tool provides the feature 'autocompar'. Did you mean 'autocompare'? "
        "Features: autocompare, fallback.",
    ),
    (
        OperatorNameError("torch.ad", ["torch.add"]),
        "operator name 'torch.ad' leads to no function. Near names: torch.add. Write it as a "
        "program does, such as torch.add, torch.Tensor.add or torch.nn.functional.linear; a "
        "third-party module must be importable.",
    ),
    (ToolVariableError("OP_X", "a,b", "two numbers"), "OP_X is 'a,b'; expected two numbers."),
    (
        OverflowFoundError("torch.exp", "torch.exp outputs", "2 inf of 3 values", "m.py:3"),
        "torch.exp: torch.exp outputs holds inf or nan: 2 inf of 3 values. At: m.py:3. Look at the "
        "operator's inputs in the table above; raise_on_bad=False only reports.",
    ),
    (
        CaptureFormatError("a/input", "it is damaged"),
        "capture 'a/input' cannot be read: it is damaged. Capture again with "
        "dicp.op_tools.OpCapture.",
    ),
    (
        RecordingMismatchError(
            "a", ["w: missing in the recording, torch.float32 (3,) in the model"]
        ),
        "the recording 'a' is of another model or optimizer than the one given:\n"
        "  w: missing in the recording, torch.float32 (3,) in the model\n"
        "Give one_iter.compare those that were recorded, with the same settings, or record these "
        "with dicp.op_tools.one_iter.record.",
    ),
    (
        ConformanceConfigError(Path("chip.toml"), 3, "a skip without a reason"),
        "chip.toml:3: a skip without a reason. dicp/conformance/configuration.py shows the form.",
    ),
    (
        FamilyNameError("qwen", ["qwen3", "llama3"]),
        "no family of models is called 'qwen'. Did you mean 'qwen3'? Families: qwen3, llama3.",
    ),
    (
        FamilyPackageError("qwen3", "transformers", "no module named 'transformers'"),
        "qwen3 is built by transformers: no module named 'transformers'. Install it: pip install "
        "transformers",
    ),
    (
        CaseError("rand", "generator", ["randn", "uniform"]),
        "unknown generator 'rand'. Did you mean 'randn'? It begins with one of: randn, uniform.",
    ),
    (
        CaseFileError(Path("a.toml"), "add", "call is missing"),
        "a.toml: case 'add': call is missing. dicp/conformance/suite/files.py shows the form.",
    ),
    (
        ReferenceDataError(Path("d/add.json"), "it is damaged", "make it"),
        "d/add.json: it is damaged. `make it` makes reference data.",
    ),
    (
        OldDeviceConfigError(Path("device_configs.py"), Path("device_config.toml")),
        "device_configs.py is a configuration in Python, which is not run. Convert it: `python -m "
        "dicp.conformance convert-config device_configs.py -o device_config.toml`.",
    ),
    (
        GgufFileError(Path("a.gguf"), "tensor 'ans' is missing", 2),
        "a.gguf: case 2: tensor 'ans' is missing. `python -m dicp.conformance gguf write OPERATOR "
        "-o FILE` writes a case file.",
    ),
    (
        MissingPackageError("gguf", "GGUF case files", "gguf"),
        "GGUF case files need the package 'gguf', which is not installed: pip install gguf, or "
        "pip install 'dicp[gguf]'.",
    ),
    (
        TestFileError("test_a.py", ""),
        "the test file 'test_a.py' cannot run: TORCH_SOURCE_PATH names no source tree of PyTorch; "
        "set it to a checkout.",
    ),
    (
        ConfigValueError("option 'x'", 3, "a text", "Give a text."),
        "option 'x' is 3; expected a text. Give a text.",
    ),
    (
        TargetNotFoundError("cpuu", ["cpu", "other"]),
        "no target named 'cpuu' is installed. Did you mean 'cpu'? Installed targets: cpu, other. "
        "A target is registered by an entry point in the group 'dicp.targets'; install the "
        "package that brings it, or choose another backend.",
    ),
    (
        InvalidTargetError("x", "pkg:X", ["its name is not a str", "facts are missing"]),
        "target 'x' (pkg:X) cannot be used: its name is not a str; facts are missing. Fix the "
        "package that registers it under the entry points `dicp.targets`, or uninstall it.",
    ),
    (
        TargetNotFoundError("x", []),
        "no target named 'x' is installed. Installed targets: none. "
        "A target is registered by an entry point in the group 'dicp.targets'; install the "
        "package that brings it, or choose another backend.",
    ),
    (
        ToolchainError("cpu", "a C++ compiler", "neither g++ nor clang++ is found", "Install g++"),
        "target 'cpu' needs a C++ compiler: neither g++ nor clang++ is found. Install g++. "
        "`python -m dicp doctor` checks the whole toolchain; "
        "on_compile_error='eager' runs the model uncompiled meanwhile.",
    ),
    (
        CompilerError("cpu", ["g++", "a b.cpp"], "", ()),
        "target 'cpu': the compiler failed on generated code.\n"
        "command:\n"
        "  g++ 'a b.cpp'\n"
        "first errors:\n"
        "  (the compiler printed nothing)\n"
        "Set dump=<folder> (DICP_DUMP) to keep the source, check the compiler with "
        "`python -m dicp doctor`, or set on_compile_error='eager' to run uncompiled.",
    ),
    (
        CompilerError(
            "cpu",
            ["g++", "a.cpp"],
            "a.cpp: In function 'f':\n" + "".join(f"a.cpp:{i}: error: e{i}\n" for i in range(5)),
            ["relu at model.py:3"],
        ),
        "target 'cpu': the compiler failed on generated code.\n"
        "command:\n"
        "  g++ a.cpp\n"
        "first errors:\n"
        "  a.cpp:0: error: e0\n"
        "  a.cpp:1: error: e1\n"
        "  a.cpp:2: error: e2\n"
        "  ... and 2 more\n"
        "compiled from:\n"
        "  relu at model.py:3\n"
        "Set dump=<folder> (DICP_DUMP) to keep the source, check the compiler with "
        "`python -m dicp doctor`, or set on_compile_error='eager' to run uncompiled.",
    ),
    (
        UnsupportedOperatorError(
            "aten.svd.default",
            ["float32"],
            [(3, "s0")],
            "cpu",
            "model.py:7: torch.svd(x)",
            "no rule and no decomposition",
        ),
        "target 'cpu' does not compile aten.svd.default(float32[3, s0]): no rule and no "
        "decomposition. At: model.py:7: torch.svd(x). fallback='error' forbids running it "
        "eagerly; set fallback='auto' (DICP_FALLBACK), or rewrite the line.",
    ),
    (
        LaunchError("gpu", "k1", "out of memory (2)", ["aten.add.Tensor (add) at model.py:3"]),
        "target 'gpu': kernel k1 cannot be run: out of memory (2).\ncompiled from:\n"
        "  aten.add.Tensor (add) at model.py:3\n"
        "Where the device reports a failed assertion or an illegal access, the message printed "
        "before this one names the operator; the process must be started again.",
    ),
    (
        InferenceMismatchError("add_1", "shape", (2, 3), (3, 2)),
        "add_1: the target infers shape (3, 2), PyTorch infers (2, 3). This is a defect of the "
        "conversion, not of the model: please report it with the graph that dump=<folder> "
        "(DICP_DUMP) writes.",
    ),
    (
        InputMismatchError(1, "float32[2, 3]", "float16[2, 3]"),
        "input 1 of the compiled graph is float16[2, 3]; the graph was compiled for "
        "float32[2, 3]. Call the function returned by torch.compile, which recompiles where that "
        "is needed, and not the compiled graph itself.",
    ),
    (
        InputLayoutError(1, torch._mkldnn),
        "input 1 of the compiled graph is one of layout torch._mkldnn; the graph was compiled for "
        "a strided tensor. Call the function returned by torch.compile, which "
        "recompiles where that is needed, and not the compiled graph itself.",
    ),
    (
        ResultMismatchError("aten::nonzero", (4, 1), (0, 1)),
        "aten::nonzero gave a tensor of sizes [0, 1], where checks in the program (torch._check) "
        "promise [4, 1]. Correct the check, or remove it.",
    ),
    (
        DeviceMovedError("cpu", "meta"),
        "the graph was compiled for device cpu and is called with tensors on meta. Move the "
        "model and its inputs to one device before the call, and call torch.compile again after "
        "moving the model.",
    ),
    (
        IndexOutOfBoundsError("aten.embedding.default", "m.py:2: emb(x)", 9, 4, wraps=False),
        "aten.embedding.default: index out of range: 9 in a dimension of size 4. "
        "At: m.py:2: emb(x). Indices count from 0 and may not be negative; clamp them, or enlarge "
        "the dimension.",
    ),
    (
        IndexOutOfBoundsError("aten.index.Tensor", "", None, 0),
        "aten.index.Tensor: index out of range: an index in a dimension of size 0. "
        "Indices count from 0, or from -1 backwards; clamp them, or enlarge the dimension.",
    ),
    (
        SizeMismatchError("aten.put.default", "m.py:3", "numbers of elements differ", 2, 3),
        "aten.put.default: numbers of elements differ: 2 and 3. At: m.py:3. "
        "Make these sizes equal.",
    ),
    (
        HostMemoryError(["aten.sin.default (sin) at m.py:3", "aten.sum.default (sum_1)"], 4096),
        "aten.sin.default (sin) at m.py:3 and 1 more: the host is out of memory for the "
        "kernel's workspace (4096 bytes). Use a smaller batch or fewer threads, or free tensors "
        "that are no longer needed.",
    ),
    (
        IntegerDivisionByZeroError("aten.div.Tensor_mode", ""),
        "aten.div.Tensor_mode: integer division or remainder by zero. "
        "Mask the divisor, or divide in a floating-point type.",
    ),
    (
        SimulatorForbiddenError("npu", "Install the driver"),
        "target 'npu' has no device here and runs_on='device' forbids its simulator. "
        "Install the driver. Or set runs_on='auto' or 'simulator' (DICP_RUNS_ON).",
    ),
    (
        PrototypeError("Add", "input 'x2' is missing", "model.py:3"),
        "graph operator Add: input 'x2' is missing. At: model.py:3. This is a defect of the "
        "conversion, not of the model: please report it with the graph that dump=<folder> "
        "(DICP_DUMP) writes; on_compile_error='eager' runs the model uncompiled meanwhile.",
    ),
    (
        GraphRejectedError("npu", "no kernel", "cos3 (Cos)", "aten.cos.default", "model.py:3"),
        "target 'npu': the graph compiler refused operator cos3 (Cos), made from "
        "aten.cos.default. At: model.py:3. It says: no kernel. Set rejected='eager' "
        "(DICP_REJECTED) to run such operators eagerly, or dump=<folder> (DICP_DUMP) to keep the "
        "source.",
    ),
    (
        GraphRejectedError("npu", "no kernel"),
        "target 'npu': the graph compiler refused the graph. It says: no kernel. Set "
        "rejected='eager' (DICP_REJECTED) to run such operators eagerly, or dump=<folder> "
        "(DICP_DUMP) to keep the source.",
    ),
    (
        DeviceError("npu", "aclInit", 7, ""),
        "target 'npu': aclInit failed with status 7: no message. The state of the device is "
        "unknown; restart the process if the next run fails too.",
    ),
    (
        DeviceMemoryError("npu", 64, "a model's workspace"),
        "target 'npu': the device is out of memory for a model's workspace (64 bytes). Use a "
        "smaller batch, free tensors that are no longer needed, or run fewer graphs at a time.",
    ),
    (
        ModelMismatchError("npu", "A1", "A2"),
        "target 'npu': the model was built for A1 and this device is A2. Remove it with "
        "`python -m dicp cache clear`, and compile again on this machine.",
    ),
    (
        DumpFolderError(Path("/x"), "No space left on device"),
        "dump folder '/x' cannot be written: No space left on device. Point DICP_DUMP (option "
        "dump) at a folder that you can write, with space left, or unset it.",
    ),
    (
        CacheFolderError(Path("/x"), "it belongs to another user"),
        "cache folder '/x': it belongs to another user. Point DICP_CACHE_DIR (option cache_dir) "
        "at a folder that belongs to you and that nobody else can write.",
    ),
]
IDS = [f"{type(error).__name__}-{index}" for index, (error, _) in enumerate(CASES)]


@pytest.mark.parametrize(("error", "message"), CASES, ids=IDS)
def test_message(error: DicpError, message: str) -> None:
    assert str(error) == message


@pytest.mark.parametrize("error", [error for error, _ in CASES], ids=IDS)
def test_survives_pickling(error: DicpError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) and vars(again) == vars(error)


def _subclasses(of: type) -> set[type]:
    found = {c for c in of.__subclasses__() if c.__module__.startswith(f"{errors.__name__}.")}
    return found | {c for each in found for c in _subclasses(each)}


def test_every_class_is_exported_and_has_a_case() -> None:
    classes = {c for c in _subclasses(DicpError) if not c.__name__.startswith("_")}
    assert classes == {type(error) for error, _ in CASES}
    assert all(getattr(errors, c.__name__) is c for c in classes)
    assert not hasattr(errors, "Sequence"), "what the modules import is not exported"


def test_python_error_classes_hold() -> None:
    assert issubclass(IndexOutOfBoundsError, IndexError)
    assert issubclass(IntegerDivisionByZeroError, ZeroDivisionError)
    assert issubclass(ConfigValueError, ValueError)
    assert issubclass(DicpError, RuntimeError)


def test_warnings_can_be_filtered_together() -> None:
    names = ("CacheWarning", "SimulatorWarning", "FallbackWarning")
    assert all(issubclass(getattr(errors, name), DicpWarning) for name in names)
    assert issubclass(DicpWarning, UserWarning)


def test_compiler_error_keeps_the_whole_output_and_shortens_sources() -> None:
    output = "warning: w\n" + "x.cpp:1: error: e\n" * 9
    error = CompilerError("cpu", ["cc"], output, [f"node {i}" for i in range(20)])
    assert error.diagnostics == output and len(error.kernel_sources) == 20
    assert "node 7\n  ... and 12 more\n" in str(error)
    assert "warning: w" not in str(error)


def test_compiler_error_without_the_word_error_shows_the_first_lines() -> None:
    assert "first errors:\n  Killed\n" in str(CompilerError("cpu", ["cc"], "\nKilled\n"))
