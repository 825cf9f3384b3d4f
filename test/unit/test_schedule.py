"""From groups to kernels: phases, what reaches memory, loop order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import record
from torch import Tensor

from dicp.config import Config


def text_of(fn: Any, *inputs: Tensor, **options: Any) -> str:
    (program,) = record(fn, *inputs, **options).programs
    return "\n".join(kernel.text for kernel in program.kernels())


def test_adjacent_loops_become_one() -> None:
    assert "parallel v0:120" in text_of(lambda x: x.relu() + 1, torch.ones(4, 5, 6))


def test_broadcast_keeps_its_loops() -> None:
    text = text_of(lambda x, y: x + y, torch.ones(4, 5), torch.ones(5))
    assert "parallel v0:4, v1:5" in text


def test_the_contiguous_axis_is_innermost() -> None:
    text = text_of(lambda x: x.relu(), torch.ones(8, 16).t())
    assert "parallel v0:128" in text, "loops follow memory, not the order of the axes"


def test_columns_are_swept_along_memory() -> None:
    assert "kernel outer_reduction" in text_of(lambda x: x.sum(0), torch.ones(64, 32))
    assert "kernel inner_reduction" in text_of(lambda x: x.sum(1), torch.ones(64, 32))


def test_gathered_rows_are_summed_along_memory() -> None:
    """Their numbers and weights lie along the sum, but are few."""

    def weighted(x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        return (x[rows] * weights[..., None]).sum(1)

    rows = torch.zeros(16, 2, dtype=torch.int64)
    text = text_of(weighted, torch.ones(64, 32), rows, torch.ones(16, 2))
    assert "kernel outer_reduction" in text
    assert "kernel outer_reduction" in text_of(lambda x, i: x[i].sum(1), torch.ones(64, 32), rows)


def test_softmax_keeps_its_exponentials_for_the_last_sweep() -> None:
    target = record(lambda x: x.softmax(-1), torch.ones(8, 64))
    source = target.render(target.programs[0], Config()).files["kernels.cpp"]
    assert source.count("d_exp_weight(") == 1, "computed once and saved"
    assert "scratch" in target.programs[0].text()
    wide = text_of(lambda x: x.softmax(-1), torch.ones(2, 100_000))
    assert "scratch" not in wide, "too long a row for scratch memory"


@pytest.mark.parametrize("width", [64, 100_000], ids=["short", "long"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["amax", "amin"])
def test_what_is_compared_with_its_extremum_is_computed_once(
    name: str, dim: int, width: int
) -> None:
    """Twice computed, its last bit may differ, and no element may equal the extremum."""

    def equal(x: Tensor) -> Tensor:
        y = x.log1p()
        return y == getattr(y, name)(dim, keepdim=True)

    tests = [line for line in text_of(equal, torch.ones(8, width)).splitlines() if "eq(" in line]
    assert len(tests) == 1 and "log1p" not in tests[0], tests


@pytest.mark.parametrize("dim, place", [(0, "128*v0 + v1"), (1, "v0 + 128*v1")])
def test_reductions_store_along_the_memory_that_they_load(dim: int, place: str) -> None:
    """Another kernel transposes: stores across memory fall into one set of the cache where rows are
    a power of two long."""
    text = text_of(lambda x: x.t().softmax(dim), torch.ones(64, 128))
    assert f"[{place}] = exp(sub(in0[{place}]" in text
    assert text.count("kernel pointwise") == 1, "the quotients"


def test_reductions_load_operands_that_lie_across_them_from_a_copy() -> None:
    def scaled(g: Tensor, x: Tensor) -> Tensor:
        return g * (g * x).sum(1, keepdim=True)

    text = text_of(scaled, torch.ones(64, 96), torch.ones(96, 64).t())
    copy, kernel = text.split("kernel ")[1:]
    assert "[96*v0 + v1] = in1[v0 + 64*v1]" in copy and "in1[" not in kernel
    assert text_of(scaled, torch.ones(8, 8), torch.ones(8, 8).t()).count("kernel ") == 1


def test_a_wider_type_and_back_is_a_copy() -> None:
    x = torch.ones(2, 3, 8, 8, dtype=torch.bfloat16)
    text = text_of(lambda x: F.interpolate(x, scale_factor=2), x)
    assert "cast.bfloat16" not in text


def test_only_what_is_read_elsewhere_is_stored() -> None:
    (program,) = record(lambda x: F.layer_norm(x, (16,)).relu(), torch.ones(4, 16)).programs
    temps = [b for b in program.serialized["buffers"] if b["role"] == "temp"]
    assert len(temps) == 1


def test_a_view_costs_no_kernel() -> None:
    text = text_of(lambda x: x.t()[2:].flip(0) + 1, torch.ones(4, 6))
    assert text.count("kernel pointwise") == 1


def test_nothing_is_scheduled_for_empty_tensors() -> None:
    (program,) = record(lambda x: x + 1, torch.ones(0, 3)).programs
    assert program.serialized["steps"] == []


AT, ROWS = torch.tensor([4, 1]), torch.ones(2, 3)
UPDATES: dict[str, tuple[Any, int]] = {
    "rows": (lambda x: x.index_copy_(0, AT, ROWS), 1),
    "sums": (lambda x: x.index_add_(0, AT, ROWS), 1),
    "read before": (lambda x: (x.sum(), x.index_copy_(0, AT, ROWS))[0], 2),
    "read after": (lambda x: x.index_copy_(0, AT, ROWS).sum(), 2),
    "from its own rows": (lambda x: x.index_copy_(0, AT, x[:2] + 1), 2),
    "old rows kept": (lambda x: (x * 2, x.index_copy_(0, AT, ROWS))[0], 2),
    "into another tensor": (lambda x: x.index_copy(0, AT, ROWS), 2),
    "of a strided view": (lambda x: x.t().index_copy_(1, AT, ROWS.t()), 4),
}


@pytest.mark.parametrize("update", UPDATES)
def test_rows_of_an_input_are_updated_without_a_copy_of_it(update: str) -> None:
    fn, kernels = UPDATES[update]
    assert text_of(fn, torch.ones(6, 3)).count("kernel ") == kernels


# ---- images --------------------------------------------------------------------------------------

CHANNELS_LAST = torch.channels_last


def last_loops(text: str) -> list[str]:
    """The size of each kernel's last parallel loop."""
    return [x.rsplit(":", 1)[1] for x in text.splitlines() if x.startswith("  parallel v")]


def test_tables_do_not_decide_the_order_of_loops() -> None:
    """Weights and indices of interpolated pixels are few; the pixels themselves are read apart."""
    x = torch.ones(1, 24, 5, 7, dtype=torch.bfloat16).to(memory_format=CHANNELS_LAST)
    text = text_of(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), x)
    assert last_loops(text)[-1] == "24"


def test_a_shuffle_of_channels_is_one_copy() -> None:
    x = torch.ones(2, 24, 5, 7).to(memory_format=CHANNELS_LAST)
    assert text_of(lambda x: F.channel_shuffle(x, 4), x).count("kernel ") == 1
    assert text_of(lambda x: F.channel_shuffle(x, 4) + 1, x).count("kernel ") == 1


def test_padding_of_channels_last_images_is_one_kernel() -> None:
    x = torch.ones(2, 24, 5, 7).to(memory_format=CHANNELS_LAST)
    for mode in ("reflect", "replicate"):
        text = text_of(lambda x, mode=mode: F.pad(x, (2, 1, 1, 2), mode), x)
        assert last_loops(text) == ["24"]


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_gradients_of_padding_are_one_kernel(mode: str) -> None:
    x = torch.ones(2, 24, 8, 8).to(memory_format=CHANNELS_LAST).requires_grad_()
    target = record(lambda x: F.pad(x, (2, 1, 1, 2), mode), x)
    text = "\n".join(kernel.text for kernel in target.programs[-1].kernels())
    assert text.count("kernel pointwise") == text.count("kernel ") == 1
    assert last_loops(text) == ["24"]


def test_gradients_of_maxima_are_scattered_in_the_format_of_the_image() -> None:
    x = torch.ones(2, 24, 8, 8).to(memory_format=CHANNELS_LAST).requires_grad_()
    target = record(lambda x: F.max_pool2d(x, 2), x)
    text = "\n".join(kernel.text for kernel in target.programs[-1].kernels())
    assert text.count("kernel ") == 2 and last_loops(text)[-1] == "24"  # zeros, and what is added


def test_a_recurrence_is_not_computed_again_for_what_each_step_is_broadcast_to() -> None:
    def recurrence(x: Tensor, decay: Tensor) -> Tensor:
        state, states = x[:, 0] * decay, []
        for step in range(16):
            state = state * decay + x[:, step]
            states.append(state)
        return torch.stack(states, 1)

    target = record(recurrence, torch.ones(3, 16, 4).requires_grad_(), torch.ones(4))
    backward = "\n".join(kernel.text for kernel in target.programs[-1].kernels())
    assert "parallel v0:3, v1:4" in backward, "a kernel over the elements of one step"
