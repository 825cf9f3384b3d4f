"""Operands of several dtypes, numbers that are tensors of no dimension, 32-bit indices, sums in a
dtype of their own, and several results, each in one memory or apart."""

from __future__ import annotations

from dicp.fuzz.row import rows

MIXED = rows("""
    {x} + {m} | add
    {k} + {g} | add
    {f} - {j} | sub
    {f} * {j} | mul
    {k} / ({j}.abs() + 1) | div true_divide
    {k} / ({g}.abs() + 1) | div true_divide
    {x} + {lone64} | add
    {f} - {lone64} * {q} | sub mul
    {k} * {lone64} | mul
    {k} + {lone16} | add
    {x} * {lonek} | mul
    {f}.to({t_float}) * {lone64} | mul
    {lone64} ** {f} | pow
    {lone16} / ({x}.abs() + 1) | div true_divide
    torch.where({m}, {x}, {g}) | where
    torch.where({m}, {lone64}, {x}) | where
    torch.where({b}, {j}, {lone16}) | where
    torch.where({m}, {x}, {lonek}) | where
    torch.cat([{x}, {w}], {d}) | cat
    torch.cat([{f}, {z}.to({t_float})], {d}) | cat
    torch.stack([{k}, {w}], {d}) | stack cat
    torch.maximum({k}, {g})
    torch.minimum({f}, {j})
    torch.atan2({k}, {g})
    torch.hypot({f}, {g})
    torch.pow({k}.abs() + 1, {g}) | pow
    torch.pow({f}.abs() + 0.5, {j}) | pow
    torch.xlogy({k}, {g}.abs() + 0.1) | xlogy log mul where eq
    torch.addcmul({f}, {g}, {j})
    torch.addcdiv({f}, {g}, {j}.abs() + 1) | addcdiv
    torch.clamp({k}, {s}, {q}) | clamp
    torch.clamp({f}, {j}, {g}) | clamp maximum minimum
    torch.clamp({x}, {lonek}, {lone64}) | clamp maximum minimum
    {x}.masked_fill({m}, {lonek}) | masked_fill
    {k}.sum({d}, dtype=torch.int32) | sum
    {b}.sum({d}, dtype=torch.int8) | sum
    {k}.prod({d}, dtype={a}) | prod
    {k}.mean({d}, dtype={a}) | mean
    {x}.cumsum({d}, dtype={a}) | cumsum
    {f}.cumprod({d}, dtype={a}) | cumprod
    F.softmax({x}, {d}, dtype={a}) | _softmax
    F.log_softmax({x}, {d}, dtype={a}) | _log_softmax
    torch.linalg.vector_norm({f}, {p}, {d}, dtype=torch.float64) | sum pow
    {x}[{i}.int()] | index
    {x}.index_select({d}, {i}.int()) | index_select
    {x}.index_add({d}, {i}.int(), {src}) | index_add
    F.embedding({i}.int(), {r2}) | embedding embedding_dense_backward
    F.mse_loss({f}, {z}.to({t_float})) | mean
    F.batch_norm({r4}, {stat32}, {stat32_b}.abs(), {stat32_c}, {stat32_d}) | _native_batch_norm_legit_no_training
    F.group_norm({r4}, 1, {stat32}, {stat32_b}) | native_group_norm
    {f}.scatter_reduce({d}, {h}, {z}, 'prod', include_self={c}) | scatter_reduce
    {f}.scatter_reduce({d}, {h}, {z}, 'amin', include_self={c}) | scatter_reduce
    {f}.index_reduce({d}, {i}, {src}, 'prod', include_self={c}) | index_reduce
    ({r2} * {q}).t_() | t
    ({x} * {n}).transpose_({d}, {d_b}) | transpose
    {x}.clone().unsqueeze_({d}) | unsqueeze
    {x}.clone().squeeze_({d}) | squeeze
    torch.linalg.vecdot({f}, {z}, dim={d}) | mul sum
    torch.dist({f}, {z}, {p}) | sub sum
    torch.cdist({r2}, {z}, {p}) | _cdist_forward _cdist_backward
    torch.einsum('ij,kj->ki', {r2}, {z}) | mm
    torch.einsum('...ij->...ji', {f}) | permute
    torch.einsum('bij,bij->b', {r3}, {z}) | bmm
    torch.special.ndtr({f}) | erfc
    torch.mvlgamma({f}.abs() + 3, 2) | lgamma
    F.multilabel_soft_margin_loss({r2}, torch.ones_like({r2})) | log_sigmoid_forward
    F.grid_sample({r4}, torch.tanh({r4}[:, :1, :, :1].permute(0, 2, 3, 1).expand(-1, -1, 3, 2)), padding_mode='border', align_corners={c}) | grid_sampler_2d grid_sampler_2d_backward
""") + rows(  # noqa: E501
    """
    torch.remainder({k}, {g}.abs() + 1)
    torch.fmod({f}, {j}.abs() + 1)
    {k} // ({g}.abs() + 1) | floor_divide
    {x} > {lone64} | gt
    {x} == {j} | eq
    {k} <= {g} | le
    torch.argsort({x}, dim={d}, descending={c}, stable=True) | sort
    """,
    exact=True,
)

SEVERAL = (
    rows(
        """
    {x}.chunk(2, {d}) | split
    {x}.tensor_split(2, {d}) | slice
    {x}.split([{p}, {x}.shape[{d}] - {p}], {d}) | split_with_sizes
    {x}.narrow({d}, 0, 2).unbind({d}) | unbind
    torch.broadcast_tensors({x}, {y}) | expand
    torch.meshgrid({r1}, {r1_b}, indexing='ij') | expand view
    torch._foreach_mul([{f}, {z}], {s}) | mul
    torch._foreach_add([{x}, {z}], [{z}, {x}]) | add
    ({f}.view({view}), {f}) | view
    ({x}.transpose({d}, {d_b}), {x} * {s}) | transpose mul
    """,
        outs=2,
    )
    + rows(
        """
    torch.topk({x}, 1, {d}) | topk
    torch.frexp({f}) | frexp
    torch.kthvalue({x}.contiguous(), 1, {d}) | kthvalue
    F.max_pool2d({r4}, 2, {p}, return_indices=True) | max_pool2d_with_indices max_pool2d_with_indices_backward
    F.adaptive_max_pool2d({r4}, {p}, return_indices=True) | adaptive_max_pool2d adaptive_max_pool2d_backward
    """,  # noqa: E501
        exact=True,
        outs=2,
    )
    + rows(
        """
    {f}.add_({j}) | add copy_
    {f}.mul_({m}) | mul copy_
    {k}.add_({m}) | add copy_
    {f}.copy_({j}) | copy copy_
    {k}.copy_({g}.nan_to_num().clamp(0, 9)) | copy copy_
    {f}[{lo}:{hi}] = {j}[{lo}:{hi}] | slice_scatter copy
    {f}.sub_({lone64}) | sub copy_
    {f}.div_({lonek}.abs() + 1) | div copy_
    {x}.fill_({lonek}) | fill
    {x}.masked_fill_({m}, {lonek}) | masked_fill
    """,
        outs=0,
    )
)
"""Several results, and changes in place by operands of other dtypes."""
