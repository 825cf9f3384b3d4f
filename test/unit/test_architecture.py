"""Rules of the source itself, read from its syntax trees: import direction, names and idioms that
do not belong in a room, sizes. Each rule is a function from a source file to what breaks it, and
each has a small example that it must find."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dicp"

# A room imports from itself and from rooms of a lower rank.
RANKS = {
    "errors": 0,
    "version": 0,
    "torch_private": 0,
    "elf": 0,
    "private_files": 0,
    "compare": 1,
    "origin": 1,
    "module_calls": 1,
    "config": 1,
    "store": 1,
    "specializations": 1,
    "cache": 2,
    "dtypes": 1,
    "domains": 2,
    "machine": 2,
    "outline": 2,
    "serialize": 2,
    "template": 2,
    "operators": 2,
    "rules": 1,
    "effects": 2,
    "indices": 2,
    "interpolation_taps": 2,
    "fused_attention": 2,
    "serving": 2,
    "operator_choice": 3,
    "adaptor": 2,
    "discovery": 2,
    "rule_errors": 2,
    "target": 3,
    "toolchain": 3,
    "loop": 4,
    "graphop": 4,
    "oplib": 4,
    "codegen": 5,
    "gpu": 5,
    "vendor": 6,
    "dynamo_bridge": 7,
    "explain": 8,
    "fuzz": 8,
    "op_tools": 8,
    "device": 8,
    "switch": 9,
    "new_vendor": 8,
    "vendor_report": 8,
    "pytest_plugin": 8,
    "testing": 9,
    "report": 9,
    "conformance": 10,
    "cli": 10,
    "__main__": 11,
    "__init__": 11,
}
VENDOR_NAMES = re.compile(
    r"(?<![a-z])(triton|cuda|nvidia|nvcc|ascend|huawei|npu|cann|maca|metax|mxcc|tops|topsrider|"
    r"enflame|cpu)(graph)?(?![a-z])",
    re.IGNORECASE,
)
# Names that PyTorch and Python give, and prose; `torch_private.HOST` is the type of host memory.
NOT_VENDORS = re.compile(
    r"\.cpu\(\)|cpu_count|empty_strided_cpu|"
    r"\bCPU\b"
)
# Rooms in which users name PyTorch's devices, "cpu" among them.
NAME_DEVICES = frozenset(
    {"op_tools", "conformance", "device", "switch", "testing", "fuzz", "pytest_plugin"}
)
# The eager device and its switch answer to the names of the device that they stand in for.
STAND_INS = frozenset({"device", "switch"})
STOOD_IN_FOR = re.compile("cuda", re.IGNORECASE)
MOCK_VARIABLES = re.compile(r"\bDI(PU|TORCH)_\w+")
PICKLES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
# AOTAutograd's results have no other form; the cache verifies them against the user's secret first.
SIGNED_PICKLES = frozenset({("dynamo_bridge", "aot_results")})
FILE_LINES = 800
FUNCTION_LINES = 60


@dataclass(frozen=True)
class Module:
    """One source file; `name` is its place in the package, such as ("loop", "ir")."""

    name: tuple[str, ...]
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[Any]:
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        return self.name[0]

    @property
    def package(self) -> tuple[str, ...]:
        return ("dicp", *self.name[:-1])


Breaches = Iterator[str]
Rule = Callable[[Module], Breaches]


def module_at(path: Path) -> Module:
    return Module(path.relative_to(PACKAGE).with_suffix("").parts, path.read_text("utf-8"))


PATHS = sorted(PACKAGE.rglob("*.py"))
MODULES = [module_at(path) for path in PATHS]


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, inside functions too."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.package[: len(module.package) - node.level + 1] if node.level else ()
            base = ".".join((*package, *filter(None, [node.module])))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def chains(module: Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every attribute chain, its root resolved through the imports."""
    known: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            known |= {
                a.asname or a.name.split(".")[0]: a.asname and a.name or a.name.split(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    inner = {id(n.value) for n in module.nodes if isinstance(n, ast.Attribute)}
    for node in module.nodes:
        names: list[str] = []
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            names.append(root.attr)
            root = root.value
        if names and isinstance(root, ast.Name) and id(node) not in inner:
            yield root.lineno, ".".join([known.get(root.id, root.id), *reversed(names)])


def calls(module: Module) -> Iterator[ast.Call]:
    return (node for node in module.nodes if isinstance(node, ast.Call))


def import_direction(module: Module) -> Breaches:
    if module.room not in RANKS:
        yield f"room {module.room!r} has no rank: give it one in this test and in the design"
        return
    for line, name in imports(module):
        parts = name.split(".")
        if parts[0] != "dicp":
            continue
        room = parts[1] if len(parts) > 1 and parts[1] in RANKS else "__init__"
        if room != module.room and RANKS[room] >= RANKS[module.room]:
            yield f"line {line}: {module.room} imports {name}"
        if room == module.room == "vendor" and parts[2:3] != list(module.name[1:2]):
            yield f"line {line}: one vendor imports another: {name}"


def no_vendor_names(module: Module) -> Breaches:
    # torch_private names members of PyTorch, where they are as PyTorch has them.
    if module.room in ("vendor", "torch_private"):
        return
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        text = token.string
        if text == "cpu":
            text = token.line[token.start[1] - 1 : token.end[1] + 2]
        text = STOOD_IN_FOR.sub("", text) if module.room in STAND_INS else text
        found = VENDOR_NAMES.search(NOT_VENDORS.sub("", MOCK_VARIABLES.sub("", text)))
        if found and found.group() == "cpu" and module.room in NAME_DEVICES:
            continue
        if found and token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            yield f"line {token.start[0]}: {found.group()!r}"


def no_environment(module: Module) -> Breaches:
    if module.room == "config":
        return
    for line, name in (*chains(module), *imports(module)):
        if re.match(r"os\.(environb?|getenvb?|putenv|unsetenv)\b", name):
            yield f"line {line}: {name}"


def no_private_torch(module: Module) -> Breaches:
    if module.room == "torch_private":
        return
    for line, name in (*imports(module), *chains(module)):
        parts = name.split(".")
        private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        if parts[0] == "torch" and parts[1:2] != ["ops"] and private:
            yield f"line {line}: {name}"
    for call in calls(module):
        for value in call.args:
            if isinstance(value, ast.Constant) and re.match(r"torch\.(\w+\.)*_", str(value.value)):
                yield f"line {call.lineno}: {value.value!r}"


def vars_of(module: Module) -> set[str]:
    """The names that a module assigns at its top level."""
    assigned = (node.targets for node in module.tree.body if isinstance(node, ast.Assign))
    return {t.id for targets in assigned for t in targets if isinstance(t, ast.Name)}


@cache
def defined_names() -> frozenset[str]:
    """Every name that dicp itself gives to a function, class, variable or attribute."""
    found = set()
    for module in MODULES:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(found)


# Of a symbolic number: its expression, the value of the first call, its ShapeEnv.
SYMBOLIC_INTERNALS = frozenset({"expr", "hint", "has_hint", "shape_env"})
OTHER_PRIVATE_NAMES = {
    "sys._getframe": "Python has no other way to find the line that calls",
    "hasattr(value, '_fields')": "the mark of a named tuple",
    "os._exit": "ends a process that was forked without running the parent's exit handlers",
    "self._library._handle": "ctypes has no other way to close a library",
    "host.runtime._implicit_cvt": "Triton's interpreter converts arguments by it alone",
}


def no_private_attributes(module: Module) -> Breaches:
    """Attributes that PyTorch's objects keep to themselves are read in torch_private alone.

    Found as underscored attributes that dicp does not define; names of operators are exempt.
    """
    if module.room == "torch_private":
        return
    for node in module.nodes:
        name = text = ""
        if isinstance(node, ast.Attribute):
            name, text = node.attr, ast.unparse(node)
            of_symbol = isinstance(node.value, ast.Attribute) and node.value.attr == "node"
            if of_symbol and name in SYMBOLIC_INTERNALS:
                yield f"line {node.lineno}: {text}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            text = ast.unparse(node)
            name = str(getattr(node.args[1], "value", ""))
        is_operator = re.match(r"((get|has)attr\()?(torch\.ops|aten|prims)\b", text)
        private = name.startswith("_") and not name.startswith("__") and name not in defined_names()
        if private and not is_operator and text not in OTHER_PRIVATE_NAMES:
            yield f"line {node.lineno}: {text}"


def no_shell(module: Module) -> Breaches:
    for line, name in (*chains(module), *imports(module)):
        if re.match(
            r"(os\.(system|popen)|subprocess\.getoutput|subprocess\.getstatusoutput)$", name
        ):
            yield f"line {line}: {name}"
    for call in calls(module):
        for keyword in call.keywords:
            value = keyword.value
            if keyword.arg == "shell" and not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                yield f"line {call.lineno}: shell={ast.unparse(value)}"


def no_pickle(module: Module) -> Breaches:
    if module.name in SIGNED_PICKLES:
        return
    for line, name in imports(module):
        if name.split(".")[0] in PICKLES:
            yield f"line {line}: {name}"


@cache
def with_all() -> frozenset[str]:
    """The modules of dicp that list what they hand on."""
    return frozenset(".".join(("dicp", *m.name)) for m in MODULES if "__all__" in vars_of(m))


def no_open_star_import(module: Module) -> Breaches:
    """`from m import *` also hands on what `m` imports, unless `m` has an `__all__`."""
    if module.room == "torch_private":  # it hands on PyTorch's names
        return
    for line, name in imports(module):
        if name.endswith(".*") and name.removesuffix(".*") not in with_all():
            yield f"line {line}: {name}"


def no_global(module: Module) -> Breaches:
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"


def no_print(module: Module) -> Breaches:
    for call in calls(module):
        if isinstance(call.func, ast.Name) and call.func.id == "print":
            yield f"line {call.lineno}: print"


def literals(module: Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string but docstrings; values put into it are named `x`."""
    docs = {id(n.value) for n in module.nodes if isinstance(n, ast.Expr)}
    parts = {id(part) for n in module.nodes if isinstance(n, ast.JoinedStr) for part in n.values}
    for node in module.nodes:
        if isinstance(node, ast.JoinedStr):
            texts = (getattr(part, "value", "x") for part in node.values)
            yield node.lineno, "".join(t if isinstance(t, str) else "x" for t in texts)
        elif isinstance(node, ast.Constant) and id(node) not in docs | parts:
            if isinstance(node.value, str):
                yield node.lineno, node.value


_TYPE = (
    r"(void|auto|bool|char|int|long|half|float|double|size_t|u?int\d+_t|__half|__\w*bfloat16\w*|"
    r"constexpr|inline|static|extern|const|__\w+__)"
)
LANGUAGE_TEXT = re.compile(
    rf"""
      ^ (void|auto|half|double|float|size_t|u?int\d+_t|__\w+|constexpr|inline|extern|bf16|[fiu]\d+|
         fp\d+) $                                          # a type or a keyword alone
    | \b {_TYPE} [\s*&]+ \w+ \s* ([=;(\[,)] | $)           # a declaration
    | \( {_TYPE} [\s*&]* \)                                # a conversion
    | \b (for|if|while|switch|sizeof|catch) \s* \(
    | \b (return|break|continue|else|goto) \b .* [;{{]
    | \b (def|class) \s \w+ [(:] | ^ \s* (from \s [\w.]+ \s)? import \s [\w.]+
    | \b (tl|triton|math|std|at|c10|builtin) (\.|::) \w
    | _mm\d* _ | __\w+ \( | \b (f?(abs|max|min|mod|ma)|exp2?|log\d*|sqrt|pow|sin|cos)f? \(
    | [{{}}] | -> | && | \|\| | (?<![&|^]) [-+*/%&|^] = | \+\+ | -- | << | >>
    | \# \s* (include|pragma|define|if|endif) | /\* | \*/ | // \s | ; \s* $
    | @ \w | \? .* : | \d \. \d* f \b
    """,
    re.VERBOSE | re.MULTILINE,
)


def no_language_text(module: Module) -> Breaches:
    """Loop programs have no text of any language: renderers alone write it."""
    if module.room != "loop":
        return
    for line, text in literals(module):
        found = LANGUAGE_TEXT.search(text)
        if found and text.strip() != ";":
            yield f"line {line}: {text!r} contains {found.group()!r}"


def no_thresholds_in_renderers(module: Module) -> Breaches:
    """Renderers print the kernel's form: what depends on a size was decided with the form."""
    if "render" not in module.name and module.room != "codegen":
        return
    for line, name in imports(module):
        if "thresholds" in name.split("."):
            yield f"line {line}: a renderer imports {name}"


def readable_sizes(module: Module) -> Breaches:
    lines = module.text.count("\n")
    if lines > FILE_LINES:
        yield f"{lines} lines"
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {length} lines"


RULES: tuple[Rule, ...] = (
    import_direction,
    no_vendor_names,
    no_environment,
    no_private_torch,
    no_private_attributes,
    no_shell,
    no_pickle,
    no_open_star_import,
    no_global,
    no_print,
    no_language_text,
    no_thresholds_in_renderers,
    readable_sizes,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps(rule: Rule) -> None:
    breaches = [
        f"dicp/{'/'.join(module.name)}.py: {breach}"
        for module in MODULES
        for breach in rule(module)
    ]
    assert not breaches, "\n".join(["", *breaches])


def test_loop_programs_have_no_templates_and_no_headers() -> None:
    files = [p for p in (PACKAGE / "loop").rglob("*") if "__pycache__" not in p.parts]
    assert not [p for p in files if p.is_file() and p.suffix != ".py"]


def test_imports_have_no_cycle() -> None:
    names = {".".join(("dicp", *m.name)).removesuffix(".__init__"): m for m in MODULES}
    edges: dict[str, set[str]] = {}
    for name, module in names.items():
        found = {n if n in names else n.rpartition(".")[0] for _, n in imports(module)}
        edges[name] = (found & names.keys()) - {name}
    TopologicalSorter(edges).prepare()  # raises CycleError, with the cycle


def test_benchmarks_have_no_import_cycle() -> None:
    root = PACKAGE.parent / "benchmarks"
    edges = {}
    for path in root.glob("*.py"):
        found = imports(Module(("benchmarks", path.stem), path.read_text("utf-8")))
        parts = [name.split(".") for _, name in found if name.startswith("benchmarks.")]
        edges[path.stem] = {p[1] for p in parts if (root / f"{p[1]}.py").exists()} - {path.stem}
    TopologicalSorter(edges).prepare()  # raises CycleError


def test_folders_with_source_are_packages() -> None:
    folders = {path.parent for path in PATHS}
    missing = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, "setuptools leaves out a folder without __init__.py"


EXAMPLES: list[tuple[Rule, str, str, str]] = [
    (import_direction, "loop/ir", "from dicp.vendor import cpu", "loop imports dicp.vendor.cpu"),
    (import_direction, "loop/ir", "import dicp.graphop", "loop imports dicp.graphop"),
    (import_direction, "loop/ir", "def f():\n    from .. import cli", "loop imports dicp.cli"),
    (import_direction, "loop/ir", "from dicp import explain", "loop imports dicp.explain"),
    (import_direction, "loop/ir", "from dicp import Backend", "loop imports dicp.Backend"),
    (import_direction, "loop/ir", "import dicp", "loop imports dicp"),
    (import_direction, "config", "from dicp import cache", "config imports dicp.cache"),
    (import_direction, "vendor/a/x", "from dicp.vendor.b import y", "one vendor imports another"),
    (import_direction, "newroom/x", "", "room 'newroom' has no rank"),
    (no_vendor_names, "loop/ir", "def is_cuda(): ...", "'cuda'"),
    (no_vendor_names, "loop/ir", "x = 'tritongraph'", "'tritongraph'"),
    (no_vendor_names, "loop/ir", "x.type == 'cpu'", "cpu"),
    (no_vendor_names, "loop/ir", "# as Ascend wants it", "'Ascend'"),
    (no_environment, "loop/ir", "import os\nos.environ['X']", "os.environ"),
    (no_environment, "loop/ir", "import os as o\no.getenv('X')", "os.getenv"),
    (no_environment, "loop/ir", "from os import environ as e", "os.environ"),
    (no_private_torch, "loop/ir", "import torch\ntorch._ops.OpOverload", "torch._ops.OpOverload"),
    (no_private_torch, "loop/ir", "import torch._dynamo", "torch._dynamo"),
    (no_private_torch, "loop/ir", "from torch.fx import _x", "torch.fx._x"),
    (no_private_torch, "loop/ir", "from torch import fx as g\ng._x.y", "torch.fx._x.y"),
    (no_private_torch, "loop/ir", "load('torch._inductor')", "'torch._inductor'"),
    (no_private_attributes, "loop/ir", "size.node.expr", "size.node.expr"),
    (no_private_attributes, "loop/ir", "op._schema.name", "op._schema"),
    (no_private_attributes, "loop/ir", "getattr(op, '_schema', None)", "'_schema'"),
    (no_shell, "loop/ir", "run('x', shell=True)", "shell=True"),
    (no_shell, "loop/ir", "run('x', shell=flag)", "shell=flag"),
    (no_shell, "loop/ir", "import os\nos.system('x')", "os.system"),
    (no_pickle, "loop/ir", "import pickle as p", "pickle"),
    (no_pickle, "loop/ir", "from cloudpickle import loads", "cloudpickle.loads"),
    (no_open_star_import, "config/__init__", "from dicp.version import *", "dicp.version.*"),
    (no_global, "loop/ir", "def f():\n    global x", "global x"),
    (no_print, "loop/ir", "print('x')", "print"),
    *(
        (no_language_text, "loop/ir", f"x = {text!r}", repr(text))
        for text in (
            "float",
            "int64_t",
            "tl.float32",
            "float total = 0",
            "const int",
            "(float)",
            "a + b;",
            "for (",
            "return total;",
            "if (x) {",
            "tl.load(",
            "def kernel(a0):",
            "std::max(",
            "expf(",
            "a && b",
            "total += value",
            "#pragma omp simd",
            "// sum",
            "a ? b : c",
            "1.0f",
            "@triton.jit",
            "_mm512_set1_ps",
            "__syncthreads()",
            "{0} + {1}",
            "out[i] = x;",
        )
    ),
    (no_language_text, "loop/ir", "x = f'{t} sum = {v};'", "'x sum = x;' contains ';'"),
    (
        no_thresholds_in_renderers,
        "vendor/a/render/x",
        "from dicp.vendor.a.thresholds import B",
        "imports dicp.vendor.a.thresholds.B",
    ),
    (readable_sizes, "loop/ir", "\n" * 801, "801 lines"),
    (readable_sizes, "loop/ir", "def f():\n" + "    x\n" * 60, "f has 61 lines"),
]


@pytest.mark.parametrize(
    ("rule", "name", "text", "breach"), EXAMPLES, ids=[f"{e[0].__name__}-{e[3]}" for e in EXAMPLES]
)
def test_rule_finds(rule: Rule, name: str, text: str, breach: str) -> None:
    found = list(rule(Module(tuple(name.split("/")), text)))
    assert any(breach in each for each in found), found


ALLOWED: list[tuple[Rule, str, str]] = [
    (import_direction, "loop/lowering/x", "from . import core\nfrom ..ir import Node"),
    (import_direction, "vendor/a/x", "from dicp.vendor.a import y\nfrom dicp.loop import ir"),
    (import_direction, "cli", "import torch\nfrom dicp.explain import explain"),
    (no_vendor_names, "loop/ir", "x = 'max-autotune-no-cudagraphs'  # descending, stops"),
    (no_vendor_names, "vendor/a/x", "cuda = 1"),
    (no_vendor_names, "loop/ir", "x.detach().cpu().contiguous()"),
    (no_environment, "config", "import os\nos.environ"),
    (no_private_torch, "loop/ir", "import torch\ntorch.ops.aten._softmax.default"),
    (no_private_torch, "loop/ir", "import torch\ntorch.Tensor.__add__\nself._x"),
    (no_private_attributes, "loop/ir", "torch.ops.aten._softmax\naten._conj(x)\nx.node.name"),
    (no_shell, "loop/ir", "run(['x'], shell=False)"),
    (no_open_star_import, "errors/__init__", "from dicp.errors.base import *"),
    (no_language_text, "loop/ir", 'def f():\n    """float total = 0;"""'),
    (no_language_text, "loop/ir", "'; '.join(x)\nf'{op}({a}, {b})'\nf'{a}//{b} + {c}'\n'const'"),
    (no_language_text, "loop/ir", "'if the sum, for integers, is a float or an int'"),
    (no_language_text, "codegen/x", "'float total = 0;'"),
]


@pytest.mark.parametrize(("rule", "name", "text"), ALLOWED)
def test_rule_allows(rule: Rule, name: str, text: str) -> None:
    assert list(rule(Module(tuple(name.split("/")), text))) == []
