"""`record`: the operators that a program or the reference models call, as case files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dicp.conformance.recorded.recorder import Recording, recording, run_script
from dicp.conformance.recorded.reference_models import MODELS as REFERENCE_MODELS
from dicp.conformance.recorded.reference_models import recorded_model
from dicp.conformance.suite.sources import MODELS
from dicp.errors.text import nearest_is


def record(
    script: Annotated[str, typer.Option(help='A command: "python train.py ...".')] = "",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The case file, JSON.")] = None,
    models: Annotated[
        str, typer.Option(help="Reference models, separated by commas, or `all`.")
    ] = "",
) -> None:
    """Record the operators that a program calls as a case file, which --model_name FILE.json runs.

    With --models, one training step of each reference model, into its committed list or the folder
    that -o names.
    """
    if bool(script) == bool(models):
        raise typer.BadParameter("either --script or --models")
    if script:
        path = out or Path("recorded.json")
        if path.suffix != ".json":
            raise typer.BadParameter(f"{path} has to end with .json", param_hint="-o")
        _write(path, recording(path.stem, {"script": script}, lambda: run_script(script)))
        return
    names = list(REFERENCE_MODELS) if models == "all" else models.split(",")
    for name in names:
        if name not in REFERENCE_MODELS:
            hint = nearest_is(name, list(REFERENCE_MODELS))
            raise typer.BadParameter(f"no model {name!r}{hint}", param_hint="--models")
    for name in names:
        _write((out or MODELS) / f"{name}.json", recorded_model(name))


def _write(path: Path, found: Recording) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(found.text(), "utf-8")
    for what, count in sorted(found.left_out.items()):
        sys.stdout.write(f"{count} calls left out: {what}\n")
    operators = {entry["name"] for entry in found.entries}
    sys.stdout.write(f"{len(operators)} operators in {path}, {path.stat().st_size} bytes\n")
