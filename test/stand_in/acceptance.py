"""How many of the generated sources each set of CANN's operator headers accepts.

    make acceptance

Each graph that the tests compile is lowered for an installation of every header set, which its
rules choose by, and for the simulator, which has all operators; each source is held against every
set: operators, ports, attributes, dtypes, defaults. Nothing is built; graphs run operator by
operator. At the end all sources go through a compiler in a few translation units, and the counts
are printed; too few make the run fail.

STAND_IN_HEADERS names further sets: folders of headers, or files, as in `8.5=/opt/cann/op_graph`.
STAND_IN_INCLUDES is a folder of GE's own headers to compile with in place of the simulator's.
STAND_IN_RUN=1 has the graphs built and run in the simulator, too, as without this plugin.
STAND_IN_COUNTS is a file for all verdicts, as JSON, to add up several runs.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in.cann import DTYPES, GE_DTYPES, SETS, Operator, operators

from dicp.graphop.program import Graph, Node
from dicp.graphop.prototype import Port
from dicp.target import Artifact
from dicp.vendor.ascend import AscendTarget
from dicp.vendor.ascend.codegen import ENTRY, node_names, render_graph
from dicp.vendor.ascend.probe import (
    EVERY_OPERATOR,
    Installed,
    declared_operators,
    dtype_groups,
    usable_operators,
)
from dicp.vendor.ascend.prototypes import PROTOTYPES
from dicp.vendor.ascend.rules.core import Ge
from dicp.vendor.ascend.toolchain import FLAGS, INCLUDES

ALL = "every operator"
"""What sources are called that were generated with all operators at hand."""
SHARE = 0.98
"""Of the sources generated for a set, the share that it has to accept; of those generated with all
operators at hand, their union has to accept each."""
UNION = "their union"
RUNS = os.environ.get("STAND_IN_RUN") == "1"
UNIT = 150
"""Sources in one translation unit."""

# ---- header sets ---------------------------------------------------------------------------------

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_OPERATOR = re.compile(r"REG_OP\((\w+)\)(.*?)OP_END_FACTORY_REG", re.DOTALL)
_ROW = re.compile(
    r"\.(INPUT|OPTIONAL_INPUT|DYNAMIC_INPUT|OUTPUT|DYNAMIC_OUTPUT|REQUIRED_ATTR|ATTR)"
    r"\(\s*(\w+)\s*,([^\n]*)\)"
)
SHORT = {dtype: name for name, dtype in DTYPES.items()}
_MARKS = {"OPTIONAL_INPUT": "?", "DYNAMIC_INPUT": "*", "DYNAMIC_OUTPUT": "*"}


def read_headers(text: str) -> dict[str, Operator]:
    """The operators that headers register, one part a line; where they define groups of dtypes, as
    GE's header of types does, ports that name one are held against it."""
    groups = {
        name: tuple(SHORT[dtype] for dtype in dtypes) for name, dtypes in dtype_groups(text).items()
    }
    found: dict[str, Operator] = {}
    for kind, body in _OPERATOR.findall(_COMMENT.sub("", text)):
        inputs: dict[str, tuple[str, ...]] = {}
        outputs: dict[str, tuple[str, ...]] = {}
        attrs: dict[str, tuple[str, str | None]] = {}
        for what, name, rest in _ROW.findall(body):
            if "ATTR" in what:
                type_, _, default = rest.partition(",")
                attrs[name] = (type_.strip(), None if what[0] == "R" else default.strip())
                continue
            ports = inputs if "INPUT" in what else outputs
            ports[name + _MARKS.get(what, "")] = _listed(rest, groups)
        found.setdefault(kind, Operator("", kind, inputs, outputs, attrs))
    return found


def _listed(text: str, groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The dtypes of a list or a group; none where neither is known."""
    named = re.fullmatch(r"\s*(?:ge::)?TensorType::(\w+)\(\)\s*", text)
    if named:
        return groups.get(named[1], ())
    names = {f"DT_{name}": short for short, name in GE_DTYPES.items()}
    listed = re.fullmatch(r"\s*TensorType\(\{([^()]*)\}\)\s*", text)
    given = re.findall(r"DT_\w+", listed[1]) if listed else []  # some lists lack a comma
    return tuple(names.get(d) or _short(d) for d in given)


def _short(dtype: str) -> str:
    if dtype == "DT_FLOAT32":
        return "f32"
    name = dtype.removeprefix("DT_").lower()
    return name.replace("uint", "u").replace("int", "i")


def header_sets() -> dict[str, tuple[dict[str, Operator], Installed]]:
    """By name: what a set declares, and what dicp reads in it."""
    texts = {
        name: "\n\n".join(operator.registration() for operator in operators(name).values())
        for name in SETS
    }
    found = {name: (operators(name), text) for name, text in texts.items()}
    for given in filter(None, os.environ.get("STAND_IN_HEADERS", "").split(os.pathsep)):
        name, _, place = given.rpartition("=")
        files = sorted(Path(place).rglob("*.h")) if Path(place).is_dir() else [Path(place)]
        text = "\n".join(file.read_text(errors="replace") for file in files)
        found[name or place] = (read_headers(text), text)
    return {
        name: (declared, usable_operators(declared_operators([text], dtype_groups(text))))
        for name, (declared, text) in found.items()
    }


# ---- one source against one set ------------------------------------------------------------------

_STATEMENT = re.compile(r'auto (\w+) = Op\("\w+", "(\w+)"\)(.*?);$', re.DOTALL | re.MULTILINE)
_INPUT = re.compile(r'\.In\("(\w+)", (?:\d+, )?(\w+)(?:, "(\w+)")?\)')
_ATTR = re.compile(r'\.(Int|Bool|Float|String|Type|ListInt|ListFloat)\("(\w+)", ')
_PORT = re.compile(r'\.(In|InDesc|OutDesc|DynamicIn|DynamicOut)\("(\w+)", (\d+, \w)?')


def refusals(
    graph: Graph,
    source: str,
    declared: Mapping[str, Operator],
    ports: Mapping[tuple[str, str], str],
) -> Iterator[tuple[str, str]]:
    """The operators that a header set refuses in the source of a graph, and why; `declared` is the
    set."""
    nodes = {name: node for node, name in node_names(graph).items()}
    for name, kind, text in _STATEMENT.findall(source):
        operator = declared.get(kind)
        if operator is None:
            yield name, f"there is no {kind}"
            continue
        for why in (
            *_wrong_ports(operator, text),
            *_wrong_inputs(operator, text, nodes, declared),
            *_wrong_attrs(operator, text),
            *_wrong_results(operator, nodes[name], ports),
        ):
            yield name, f"{kind}: {why}"


def _wrong_ports(operator: Operator, text: str) -> Iterator[str]:
    for member, port, indexed in _PORT.findall(text):
        known = operator.outputs if "Out" in member else operator.inputs
        many = member.startswith("Dynamic") or bool(indexed)
        if not any(name in known for name in ([f"{port}*"] if many else [port, f"{port}?"])):
            yield f"{member} has no {port!r}"
    given = {port for member, port, _ in _PORT.findall(text) if member in ("In", "DynamicIn")}
    for port in operator.inputs:
        if not port.endswith("?") and port.rstrip("*") not in given:
            yield f"input {port!r} is missing"


def _wrong_inputs(
    operator: Operator, text: str, nodes: Mapping[str, Node], declared: Mapping[str, Operator]
) -> Iterator[str]:
    for port, source, output in _INPUT.findall(text):
        node = nodes[source]
        made = declared.get(node.kind)
        names = _numbered(made.outputs, len(node.outputs)) if made is not None else ["y"]
        if output and output not in names:
            yield f"{node.kind} has no output {output!r}"
            continue
        dtype = node.outputs[names.index(output) if output else 0].dtype
        listed = operator.inputs.get(port) or operator.inputs.get(f"{port}?") or \
            operator.inputs.get(f"{port}*")  # fmt: skip
        if listed and dtype not in {DTYPES.get(d) for d in listed}:
            yield f"{port!r} takes no {str(dtype).removeprefix('torch.')}"


def _numbered(outputs: Mapping[str, Any], count: int) -> list[str]:
    """The names of results, of which one port may give several."""
    names: list[str] = []
    for port in outputs:
        names += [f"{port[:-1]}{k}" for k in range(count)] if port.endswith("*") else [port]
    return names


def _wrong_attrs(operator: Operator, text: str) -> Iterator[str]:
    given = {name: type_ for type_, name in _ATTR.findall(text)}
    for name, type_ in given.items():
        declared = operator.attrs.get(name)
        if declared is None:
            yield f"there is no attribute {name!r}"
        elif declared[0] != type_:
            yield f"attribute {name!r} is {declared[0]}, not {type_}"
    counted = {attr.name: attr.default for attr in PROTOTYPES[operator.kind].attrs}
    for name, (_, default) in operator.attrs.items():
        if name in given:
            continue
        if default is None:
            yield f"attribute {name!r} is missing"
        elif name in counted and plain(counted[name] or "") != plain(default):
            yield f"attribute {name!r} is {default} where none is given, not {counted[name]}"


def plain(default: str) -> Any:
    """A default as a value: headers write numbers and lists in several ways."""
    text = default.strip().strip('{}"').replace(" ", "")
    try:
        return [float(number.rstrip("fF")) for number in text.split(",")]
    except ValueError:
        return text


def _wrong_results(
    operator: Operator, node: Node, ports: Mapping[tuple[str, str], str]
) -> Iterator[str]:
    known = PROTOTYPES[node.kind].outputs
    known = known * len(node.outputs) if known[0].arity == "many" else known
    for port, value in zip(known, node.outputs, strict=False):
        called = ports.get((node.kind, port.name), port.name)
        listed = operator.outputs.get(called, operator.outputs.get(f"{called}*"))
        if listed is None:
            yield f"there is no output {called!r}"
        elif listed and value.dtype not in {DTYPES.get(d) for d in listed}:
            yield f"{called!r} is no {str(value.dtype).removeprefix('torch.')}"


# ---- counting ------------------------------------------------------------------------------------


@dataclass
class Row:
    """Sources that were generated for one set, held against one."""

    total: int = 0
    accepted: int = 0
    refused: dict[str, list[Any]] = field(default_factory=dict)
    """By why: in how many sources, and one of their tests."""

    @property
    def share(self) -> float:
        return self.accepted / self.total

    def add(self, whys: Iterable[str], test: str) -> None:
        whys = set(whys)
        self.total += 1
        self.accepted += not whys
        for why in whys:
            self.refused.setdefault(why, [0, test])[0] += 1


@dataclass
class Counts:
    """What each set says against each source that was generated for it."""

    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By what a source was generated for and its digest: its test, and the reasons of each set."""
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, made_for: str, graph: Graph, source: str, test: str) -> None:
        digest = hashlib.sha256(source.encode()).hexdigest()[:20]
        if f"{made_for} > {digest}" in self.verdicts:
            return
        sets = header_sets_once()
        ports = sets[made_for][1].ports if made_for in sets else {}
        found = {
            name: list(refusals(graph, source, declared, ports))
            for name, (declared, _) in sets.items() if made_for in (ALL, name)
        }  # fmt: skip
        whys = {name: [why for _, why in refused] for name, refused in found.items()}
        if made_for == ALL:
            nowhere = set.intersection(*({op for op, _ in refused} for refused in found.values()))
            whys[UNION] = [why for op, why in next(iter(found.values())) if op in nowhere]
        self.sources.setdefault(digest, source)
        self.verdicts[f"{made_for} > {digest}"] = {"test": test, "whys": whys}

    def table(self) -> dict[str, Row]:
        """By what sources were generated for > what they are held against."""
        rows: dict[str, Row] = defaultdict(Row)
        for key, verdict in self.verdicts.items():
            for name, whys in verdict["whys"].items():
                rows[f"{key.partition(' > ')[0]} > {name}"].add(whys, verdict["test"])
        return rows


_SETS: dict[str, Any] = {}


def header_sets_once() -> dict[str, tuple[dict[str, Operator], Installed]]:
    if not _SETS:
        _SETS.update(header_sets())
    return _SETS


def compile_all(sources: Sequence[str], includes: Sequence[str]) -> list[str]:
    """What a compiler says against generated sources; many are one translation unit."""
    heads: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        head, _, body = source.partition('extern "C"')
        heads[re.sub(r"^//.*", "", head, count=1)].append(f'extern "C"{body}')
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "unit.cpp")
        for head, bodies in heads.items():
            for start in range(0, len(bodies), UNIT):
                named = (
                    body.replace(f" {ENTRY}(", f" {ENTRY}{k}(", 1)
                    for k, body in enumerate(bodies[start : start + UNIT])
                )
                file.write_text(head + "\n".join(named))
                flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
                command = ["g++", *flags, "-fsyntax-only", *(f"-I{i}" for i in includes), str(file)]
                said = subprocess.run(command, capture_output=True, text=True, check=False)
                errors += [line for line in said.stderr.splitlines() if "error" in line]
    return errors


# ---- as a plugin ---------------------------------------------------------------------------------

COUNTS = pytest.StashKey[Counts]()
NEEDS_A_RUN = (
    "test_a_storage_that_was_given_back", "test_the_gradient_of_a_lookup_alone",
    "test_gradients_of_large_scores", "test_unfused_rows_of_infinite_scores_are_nan",
    "test_masks_of_scores_that_are_no_numbers",
)  # fmt: skip
"""Tests of what a run refuses, and operators that are called one by one crash at or accept; tests
of attention's numerics, as one by one PyTorch's fused kernel computes it, and not the target."""


@dataclass
class Questions:
    """What rules ask of an installation, and what they are told."""

    answers: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def same_of(self, installed: Installed) -> bool:
        """Whether an installation gives the same answers, so that the same program comes of it."""
        other = Ge(None, installed)
        return all(
            answer == (other.has(*rest) if what == "has" else other._takes(*rest))
            for (what, *rest), answer in self.answers.items()
        )


class Asked(Ge):
    """A builder that keeps what rules ask."""

    def __init__(self, fake_mode: Any, operators: Installed, questions: Questions) -> None:
        super().__init__(fake_mode, operators)
        self.questions = questions

    def has(self, *kinds: str) -> bool:
        answer = self.questions.answers["has", *kinds] = super().has(*kinds)
        return answer

    def _takes(self, kind: str, port: Port, dtype: torch.dtype) -> bool:
        answer = self.questions.answers["takes", kind, port, dtype] = \
            super()._takes(kind, port, dtype)  # fmt: skip
        return answer


def _lower(counts: Counts, original: Any, self: Any, gm: Any, context: Any) -> Any:
    """Lowers a graph for every header set; the program has all operators."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    sets = {name: installed for name, (_, installed) in header_sets_once().items()}
    self.held, self.questions = EVERY_OPERATOR, Questions()
    program, questions = original(self, gm, context), self.questions
    for name, installed in {**sets, ALL: EVERY_OPERATOR}.items():
        self.held, self.questions = installed, Questions()
        same = questions.same_of(installed)
        found = program if same else original(self, gm, context)
        for graph in found.graphs:
            counts.add(name, graph, render_graph(graph, installed.ports), test)
    if not RUNS:
        self.held_graph = copy.copy(gm)
    return program


def _load(self: Any, artifact: Artifact, cache: Any, config: Any) -> Any:
    (gm,) = artifact.objects
    gm.recompile()
    return lambda inputs: list(gm(*inputs))


def pytest_configure(config: pytest.Config) -> None:
    counts = config.stash[COUNTS] = Counts()
    lower = AscendTarget.lower
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setenv("DICP_RUNS_ON", "simulator")
    methods: dict[str, Any] = {
        "lower": lambda self, gm, context: _lower(counts, lower, self, gm, context),
        "make_builder": lambda self, fake_mode, config: Asked(fake_mode, self.held, self.questions),
    }
    if not RUNS:
        patch.setenv("DICP_CACHE", "0")
        methods |= {
            "build": lambda self, *_: Artifact(self.name, {}, {}, objects=(self.held_graph,)),
            "load": _load,
            "fingerprint": lambda self, config: "acceptance",
        }
    for name, method in methods.items():
        patch.setattr(AscendTarget, name, method)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if not RUNS and item.name.startswith(NEEDS_A_RUN)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    counted = getattr(node, "workeroutput", {}).get("acceptance")
    if counted:
        given = json.loads(counted)
        counts = node.config.stash[COUNTS]
        counts.verdicts |= given["verdicts"]
        counts.sources |= given["sources"]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    counts = session.config.stash[COUNTS]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["acceptance"] = json.dumps(asdict(counts))
        return
    if place := os.environ.get("STAND_IN_COUNTS"):
        Path(place).write_text(json.dumps(asdict(counts)))
    rows = counts.table()
    shares = [row.share for way, row in rows.items() if not way.startswith(ALL)]
    if not shares or min(shares) < SHARE or rows[f"{ALL} > {UNION}"].share < 1:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = config.stash[COUNTS]
    write = terminalreporter.write_line
    write("generated for > held against: accepted of all")
    for way, row in sorted(counts.table().items()):
        write(f"  {way}: {row.accepted} of {row.total} ({100 * row.share:.2f}%)")
        for why, (sources, test) in sorted(row.refused.items(), key=lambda item: -item[1][0]):
            write(f"    {sources:5} {why}    {test}")
    includes = [os.environ.get("STAND_IN_INCLUDES", str(INCLUDES))]
    errors = compile_all(list(counts.sources.values()), includes)
    write(f"  {len(counts.sources)} distinct sources compiled, {len(errors)} errors")
    for line in errors[:20]:
        write(f"      {line}")
