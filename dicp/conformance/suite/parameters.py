"""Which parameters of an operator take two values among its cases, and why others need not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final

from dicp.conformance.suite.case import Case, parameter_names
from dicp.conformance.suite.sources import file_entries

IMPLEMENTATION: Final = ("foreach", "fused", "capturable", "differentiable")
NOT_VARIED: Final = {
    **dict.fromkeys(IMPLEMENTATION, "how it is computed, not what"),
    **dict.fromkeys(("grad_scale", "found_inf"), "of fused steps on GPUs"),
    **dict.fromkeys(("has_complex", "has_sparse_grad"), "what the tensors are"),
    **dict.fromkeys(("size_average", "reduce"), "deprecated, in favour of reduction"),
    "dropout_p": "random in one operand of many",
    "generator": "no value",
    **dict.fromkeys(("device", "pin_memory"), "where the result lies, not what it is"),
    **dict.fromkeys(("sparse", "sparse_grad", "layout"), "what is sparse has no form in the data"),
    "requires_grad": "cases say of each tensor whether it has a gradient",
    "out": "the call without it, and a copy",
    "_stacklevel": "of a warning",
}
"""Parameters of any operator that need no second value, and why."""
_ATTENTION: Final = (
    "add_zero_attn attn_mask average_attn_weights bias_k bias_v embed_dim_to_check in_proj_bias "
    "in_proj_weight is_causal k_proj_weight key key_padding_mask need_weights num_heads "
    "out_proj_bias out_proj_weight q_proj_weight query static_k static_v training "
    "use_separate_proj_weight v_proj_weight value"
).split()
_WINDOW: Final = dict.fromkeys(
    ("dtype", "a", "alpha", "beta", "std", "tau", "sym"),
    "a window is a constant, made of arange and pointwise operators with cases of their own",
)
_PIVOT: Final = {"pivot": "without pivoting there is no decomposition on the CPU"}
_RENORM: Final = dict.fromkeys(
    ("max_norm", "norm_type"), "the weights are written too: embedding_renorm_ has its own cases"
)
_LOW_RANK: Final = dict.fromkeys(("niter", "q"), "random: the factors are not unique")
_SIGNS: Final = "signs of the factors may be chosen: only one form is compared"
_MEMORY: Final = {"memory_format": "zeros_like has cases of it; these have no values"}
_PLACES: Final = "the operator draws the places; its results are compared by distribution"
OF_OPERATORS: Final[Mapping[str, Mapping[str, str]]] = {
    "nn.functional.multi_head_attention_forward": dict.fromkeys(
        _ATTENTION, "a composition: projections and scaled_dot_product_attention have cases"
    ),
    **dict.fromkeys(("linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex"), _PIVOT),
    **dict.fromkeys(("nn.functional.embedding", "nn.functional.embedding_bag"), _RENORM),
    **dict.fromkeys(("pca_lowrank", "svd_lowrank"), _LOW_RANK),
    **{name: {"some": _SIGNS} for name in ("qr", "linalg.qr")},
    **{name: {"UPLO": _SIGNS} for name in ("linalg.eigh", "linalg.eigvalsh")},
    **dict.fromkeys(
        ("empty_like", "rand_like", "randn_like", "randint_like", "resize_as_"), _MEMORY
    ),
    "resize_": {**_MEMORY, "size": "new memory has no values"},
    "normal": {"dtype": "of the form with numbers alone, which is random"},
    "nn.functional.fractional_max_pool2d": {"_random_samples": _PLACES, "output_ratio": _PLACES},
    "nn.functional.fractional_max_pool3d": {"output_ratio": _PLACES},
    "nn.functional.linear_cross_entropy": {"label_smoothing": "cross_entropy has cases of it"},
    "nn.functional.triplet_margin_with_distance_loss": {
        "distance_function": "a function has no form in the data"
    },
    "_softmax_backward_data": {"input_dtype": "another one than the result's is for GPUs alone"},
    "expand_copy": {"implicit": "set by tracing alone"},
    "hash_tensor": {"mode": "there is one mode"},
    "linalg.vander": {"increasing": "of torch.vander, which has cases of it"},
}
"""Operator -> parameter -> why it needs no second value there."""


def reason(operator: str, parameter: str) -> str:
    """Why a parameter needs no second value; empty if it does."""
    if operator.startswith("signal.windows."):
        return NOT_VARIED.get(parameter) or _WINDOW.get(parameter, "")
    return NOT_VARIED.get(parameter) or OF_OPERATORS.get(operator, {}).get(parameter, "")


def unvaried(operator: str, cases: Iterable[Case]) -> list[str]:
    """The parameters that need a second value and get none, by the cases of an operator.

    Cases of case files that call the same functions count, too. A parameter that is left away has
    its default; a tensor's value is its form.
    """
    values: dict[str, set[str]] = defaultdict(set)
    of_database = list(cases)
    calls = {case.call.removeprefix("op_db:").removeprefix("torch.") for case in of_database}
    calls.add(operator)
    for case in chain(of_database, _of_files(calls)):
        named = case.named
        for parameter in {*parameter_names(case.call, len(case.args), case.kwargs), *named}:
            values[parameter].add(str(named.get(parameter, "left away")))
    return sorted(
        parameter for parameter, given in values.items()
        if len(given) < 2 and parameter not in ("self", "input", "args", "kwargs")
        and not reason(operator, parameter)
    )  # fmt: skip


def _of_files(calls: Iterable[str]) -> Iterable[Case]:
    wanted = {f"torch.{call}" for call in calls}
    wanted |= {f"torch.Tensor.{call}_" for call in calls}
    wanted |= {f"torch.ops.aten.{call}.Tensor" for call in calls}
    for entries in file_entries().values():
        for entry in entries:
            if entry.call in wanted:
                yield from entry.cases
