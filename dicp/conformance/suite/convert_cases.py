"""Converts case files of public DIOPI, in Python, into TOML: parsed, never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dicp.conformance.suite.convert import HALF, parsed_table
from dicp.errors import ConformanceConfigError
from dicp.op_tools.cases import toml

VARIABLE: Final = "diopi_configs"
MODULE: Final = "torch.nn.functional"
"""Where an operator without an `interface` is."""
GENERATORS: Final[Mapping[str, str]] = {
    "randn": "randn", "rand": "uniform", "uniform": "uniform", "randint": "randint",
    "ones": "ones", "zeros": "zeros", "mask": "mask", "positive": "positive", "sym_mat": "sym",
    "randn_int": "randint", "randperm": "perm",
}  # fmt: skip
"""DIOPI's function -> the generator of case files."""
KNOWN: Final = frozenset({
    "name", "interface", "atol", "rtol", "atol_half", "rtol_half", "para", "tensor_para",
    "is_inplace", "no_out_ref", "no_output_ref", "saved_args", "dtype",
})  # fmt: skip
POLICIES: Final = ("default", "dflt", "gen_tensor_by_value")
"""DIOPI's `gen_policy` that say no more than the other fields do."""
TENSOR: Final = frozenset({
    "ins", "shape", "dtype", "gen_fn", "gen_policy", "requires_grad", "value", "stride",
})  # fmt: skip


def converted_cases(path: Path) -> str:
    """The TOML of a case file in Python.

    `saved_args` is left out: gradients are autograd's, which saves what it needs.

    Raises ConformanceConfigError for what is more than data, or has no form in TOML.
    """
    table = parsed_table(path, (VARIABLE,))
    entries = [text for key, entry in table.items() for text in _entries(path, key, entry)]
    return f"# Converted from {path.name}.\n\n" + "\n".join(entries)


def _entries(path: Path, key: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """A case for each name of an entry."""
    unknown = sorted(entry.keys() - KNOWN)
    if unknown:
        problem = f"{key}: {unknown[0]!r} has no form in a case file; remove it"
        raise ConformanceConfigError(path, 1, problem)
    module = (entry.get("interface") or [MODULE])[0]
    tensors = entry.get("tensor_para", {})
    args = tensors.get("args", [])
    dtypes = entry.get("dtype") or next((a["dtype"] for a in args if "dtype" in a), ["float32"])
    for name in entry["name"]:
        lines = ["[[case]]", f"name = {toml(name)}", f"call = {toml(f'{module}.{name}')}",
                 f"dtypes = {toml(dtypes)}"]  # fmt: skip
        lines += [f"{ours} = true" for theirs, ours in (
            ("is_inplace", "inplace"), ("no_out_ref", "no_reference"),
            ("no_output_ref", "no_reference"),
        ) if entry.get(theirs)]  # fmt: skip
        tolerance = _tolerance(entry, dtypes)
        lines += [f"tolerance = {toml(tolerance)}"] if tolerance else []
        lines += _tensors(path, key, args, dtypes, tensors.get("seq_name", ""))
        if entry.get("para"):
            lines.append("[case.parameters]")
            lines += [f"{n} = {toml([_parameter(v) for v in values])}"
                      for n, values in entry["para"].items()]  # fmt: skip
        yield "\n".join([*lines, ""])


def _tolerance(entry: Mapping[str, Any], dtypes: Sequence[str]) -> dict[str, list[float]]:
    """atol and rtol by dtype, where the entry states one of them."""
    found = {}
    for dtype in dtypes:
        suffix = "_half" if dtype in HALF else ""
        given = [entry.get(f"{kind}{suffix}") for kind in ("atol", "rtol")]
        if given != [None, None]:
            found[dtype] = [float(value or 0.0) for value in given]
    return found


def _parameter(value: Any) -> Any:
    return {"none": True} if value is None else value


def _tensors(
    path: Path, key: str, args: Sequence[Mapping[str, Any]], dtypes: Sequence[str], stack: str
) -> Iterator[str]:
    """The lines of an entry's tensors; those of a sequence are one."""
    names = [name for arg in args for name in arg["ins"]]
    for arg in args:
        unknown = sorted(arg.keys() - TENSOR)
        if unknown:
            problem = f"{key}: {unknown[0]!r} of a tensor has no form in a case file; remove it"
            raise ConformanceConfigError(path, 1, problem)
        if arg.get("gen_policy", POLICIES[0]) not in POLICIES:
            problem = f"{key}: gen_policy {arg['gen_policy']!r} has no form; write the shapes"
            raise ConformanceConfigError(path, 1, problem)
        for name in [stack] if stack and arg is args[0] else [] if stack else arg["ins"]:
            yield f"[case.tensors.{name}]"
            if stack:
                yield "stack = true"
            yield from _fields(arg, len(names) if stack else 0, dtypes)


def _fields(arg: Mapping[str, Any], stacked: int, dtypes: Sequence[str]) -> Iterator[str]:
    """The fields of a tensor, or of `stacked` tensors alike."""

    def each(lists: Sequence[Any]) -> str:
        return toml([[one] * stacked if stacked else one for one in lists])

    if "value" in arg:
        yield f"value = {toml(arg['value'])}"
    else:
        yield f"shape = {each(arg.get('shape', []))}"
        yield f"gen = {toml(_generator(arg.get('gen_fn', 'randn')))}"
    if arg.get("stride"):
        yield f"strides = {each(arg['stride'])}"
    if arg.get("dtype", dtypes) != dtypes:
        yield f"dtype = {toml(arg['dtype'][0])}"
    if arg.get("requires_grad") == [True]:
        yield "grad = true"


def _generator(given: Any) -> str:
    """A generator from DIOPI's name, or from its name with numbers."""
    words = given if isinstance(given, dict) else {"fn": given}
    name = GENERATORS.get(str(words["fn"]).rpartition(".")[2], str(words["fn"]))
    bounds = [words[kind] for kind in ("start", "low", "end", "high") if kind in words]
    return f"{name}({', '.join(map(str, bounds))})" if bounds else name
