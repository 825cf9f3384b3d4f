"""A test in the form of an earlier suite, which tests of that suite are written in."""

import pytest

from ..common.utils import (
    Size,
    compile_model,
    dynamo,
    get_device,
    parse_args,
    torch,
    update_dynamo_config,
)


class OpModule(torch.nn.Module):
    def forward(self, a, view_size):
        return torch.ops.aten._unsafe_view.default(a, view_size)


args = parse_args()
compiled_model = compile_model(OpModule(), args.backend, args.dynamic)


class TestUnsafeView:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize(
        ("sizes", "view_size"),
        [
            (Size((5,), (5, 3)), (-1,)),
            (Size((3, 5), (5, 3)), (1, -1)),
            (Size((2, 3, 4), (2, 4)), (-1, 4)),
        ],
    )
    @pytest.mark.parametrize("compiled_model", compiled_model)
    def test_torch_unsafe_view(self, sizes, view_size, dtype, compiled_model):
        device = get_device()
        size = sizes.dynamic if compiled_model.dynamic else sizes.static
        a = torch.randn(size, dtype=dtype)
        dynamo.reset()
        update_dynamo_config(compiled_model.dynamic)
        expected = OpModule()(a, view_size)
        found = compiled_model.model(a.to(device), view_size)
        assert torch.allclose(expected, found.cpu(), equal_nan=True)
