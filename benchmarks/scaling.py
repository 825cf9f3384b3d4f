"""`scaling`: a llama of 1, 4, 16, 64 small layers: compile time and the overhead of a step.

cold, warm: seconds to the first result in a new process. step: seconds of a step whose arithmetic
is negligible, so that what is left is the cost of guards, launches and allocations.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers as hf

from benchmarks import child
from benchmarks.backends import EAGER, FRONT_END, parse
from benchmarks.compile import cold_and_warm, middle, stages
from benchmarks.measure import alternate
from benchmarks.options import Options, mode_of
from benchmarks.report import Progress, Report, Row


def measure(layers: int, backend: str, train: bool, device: str) -> dict[str, Any]:
    """First result and steady state of a tiny llama, in seconds."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    model = hf.LlamaForCausalLM(config).to(device).train(train)
    tokens = torch.randint(0, 64, (1, 8), device=device)
    compiled = parse(backend).compile(model)

    def step() -> None:
        if not train:
            with torch.no_grad():
                compiled(input_ids=tokens)
            return
        model.zero_grad(set_to_none=True)
        compiled(input_ids=tokens).logits.sum().backward()

    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    sample = alternate({backend: step}, 1.0, device)[backend]
    return {"first": first, "step": sample.median, "stages": stages(backend)}


def run(options: Options, report: Report, progress: Progress) -> None:
    """Every number of layers on every backend."""
    report.unit, report.group_by = "s", "what"
    report.note = (__doc__ or "").partition("\n\n")[2]
    backends = list(dict.fromkeys([EAGER, *options.backends, FRONT_END]))
    cases = [(n, t, b) for t in options.modes for n in options.layers for b in backends]
    rows: dict[tuple[int, bool, str], Row] = {}
    for layers, train, backend in progress.over(cases, lambda c: f"{c[0]} layers, {c[2]}"):
        mode = mode_of(train)
        for what in ("cold", "warm", "step"):
            if (layers, train, what) not in rows:
                row = Row(f"{layers} layers", {"what": what, "mode": mode}, detail={})
                rows[layers, train, what] = row
                report.rows.append(row)
        arguments = {
            "layers": layers,
            "backend": backend,
            "train": train,
            "device": options.device,
        }
        try:
            found = cold_and_warm("layers", arguments, 1)
        except child.ChildFailed as error:
            for what in ("cold", "warm", "step"):
                rows[layers, train, what].failures[backend] = str(error)
            continue
        rows[layers, train, "step"].values[backend] = middle(found["warm"], "step")
        for state, results in found.items():
            rows[layers, train, state].detail[backend] = results
            if backend != EAGER:
                rows[layers, train, state].values[backend] = middle(results, "first")
