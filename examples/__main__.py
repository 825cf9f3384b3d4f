"""`python -m examples NAME --backend BACKEND`: text, images and training, eager beside compiled."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import typer

from dicp.errors.command_line import run_command_line
from examples.frame import ExampleError, packages

EXAMPLES = {
    "llama_generate": "a Llama writes on a prompt, with a static key-value cache",
    "hf_generate": "a causal model of transformers writes on a prompt by generate",
    "llama_finetune": "a Llama learns instructions by low-rank adapters",
    "mobilenet_v2": "MobileNet-V2 trains on one process or several",
    "needle": "networks of the course that builds needle learn handwritten digits",
    "resnet50_train": "an image classifier trains on noise or pictures, beside the CPU",
    "stable_diffusion": "a pipeline draws an image for a prompt",
}
USAGE = "usage: python -m examples NAME [options]; NAME --help lists its options\n"


def command(name: str) -> typer.Typer:
    """An example as a typer application; raises ExampleError for an unknown one."""
    if name not in EXAMPLES:
        near = get_close_matches(name, EXAMPLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ExampleError(f"no example {name!r}{hint} Examples: {', '.join(EXAMPLES)}")
    with packages():
        main = import_module(f"examples.{name}").main
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=main.__doc__)(main)
    return app


def start(name: str, arguments: Sequence[str]) -> None:
    """Run an example; what it lacks is a message on stderr and exit status 1."""

    def run(**options: str) -> None:
        with packages():
            command(name)(list(arguments), **options)

    run_command_line(run, f"python -m examples {name}")


def main(arguments: Sequence[str]) -> None:
    """Run the example that the first argument names, or list all."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, *(f"  {name:18}{does}" for name, does in EXAMPLES.items()), sep="\n")
    else:
        start(arguments[0], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
