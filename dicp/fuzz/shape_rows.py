"""Reductions, views, indices and new tensors."""

from __future__ import annotations

from dicp.fuzz.row import rows

REDUCTION = rows("""
    {x}.sum() | sum
    {x}.sum({d}) | sum
    {x}.sum({dd}, keepdim={c}) | sum
    torch.sum({x}, {dd}, dtype={a}) | sum
    {f}.mean() | mean
    {f}.mean({dd}, keepdim={c}) | mean
    torch.mean({x}, {d}, dtype={a}) | mean
    {x}.prod() | prod
    {x}.prod({d}, keepdim={c}) | prod
    {x}.amax({dd}, keepdim={c}) | amax
    {x}.amin({dd}, keepdim={c}) | amin
    {x}.max() | max
    {x}.min() | min
    {x}.max({d}, keepdim={c})[0] | max
    {x}.min({d}, keepdim={c})[0] | min
    {x}.contiguous().median() | median
    {f}.contiguous().nanmedian() | nanmedian
    {x}.contiguous().median({d})[0] | median
    {f}.contiguous().nanmedian({d})[0] | nanmedian
    {f}.var({dd}, correction={c}, keepdim={c_b}) | var
    torch.var({f}, unbiased={c}) | var
    torch.var({f}, {d}) | var
    {f}.std({dd}, correction={c}) | std var
    torch.logsumexp({f}, {dd}, keepdim={c}) | logsumexp
    torch.linalg.vector_norm({f}, {p}, {dd}) | sum pow
    torch.linalg.vector_norm({f}, inf, {d}) | amax
    torch.norm({f}) | sum
    {x}.cumsum({d}) | cumsum
    {x}.cumprod({d}) | cumprod
    {f}.logcumsumexp({d}) | logcumsumexp
    {x}.cummax({d})[0] | cummax
    {x}.cummin({d})[0] | cummin
    {x}.sort({d}, {c})[0] | sort
    {x}.topk(({x}.shape[{d}] + 1) // 2, {d})[0] | topk
    {x}.contiguous().kthvalue(1, {d})[0] | kthvalue
    torch.trace({r2}) | sum diagonal
    torch.nansum({f}, {dd}) | isnan where sum
    torch.aminmax({x}, dim={d})[0] | amin
    torch.diff({x}, dim={d}) | sub slice
    {b}.sum({d}) | sum
    {b}.cumsum({d}) | cumsum
""")

REDUCTION_PAIRS = rows(
    """
    torch.var_mean({f}, {dd}, correction={c}, keepdim={c_b}) | var_mean
    torch.std_mean({f}, {dd}, correction={c}) | std_mean
    torch.aminmax({x}) | amin amax
    """,
    outs=2,
) + rows(
    """
    torch.max({x}, {d}, keepdim={c}) | max
    torch.min({x}, {d}, keepdim={c}) | min
    torch.sort({x}, dim={d}, descending={c}, stable=True) | sort
    torch.cummax({x}, {d}) | cummax
    torch.cummin({x}, {d}) | cummin
    """,
    exact=True,
    outs=2,
)

VIEWS = rows("""
    {x}.reshape({view}) | reshape view _unsafe_view
    {x}.reshape(-1) | reshape view
    {x}.flatten({d}) | view
    {x}.contiguous().view({view}) | view contiguous clone
    {x}.permute({perm}) | permute
    {x}.transpose({d}, {d_b}) | transpose
    {x}.mT | transpose
    {r2}.t() | t permute
    {x}.unsqueeze({d}) | unsqueeze
    {x}.unsqueeze(-1) | unsqueeze
    {x}.squeeze() | squeeze
    {x}.squeeze({d}) | squeeze
    {x}.squeeze({dd}) | squeeze
    {x}.expand(2, *{x}.shape) | expand
    {x}.unsqueeze({d}).expand({up}) | expand unsqueeze
    torch.broadcast_to({x}, ({p}, *{x}.shape)) | broadcast_to expand
    {x}.flip({dd}) | flip
    {x}.narrow({d}, {lo}, 1) | narrow
    {x}.narrow({d}, 0, {x}.shape[{d}] - {p}) | narrow
    {x}[{lo}:{hi}] | slice
    {x}[..., {lo}:{hi}] | slice
    {x}[..., {lo}:{hi}:{p}] | slice
    {x}[:, {lo}:{hi}] | slice
    {x}.select({d}, {at}) | select
    {x}[{lo}] | select
    {x}[..., None] | unsqueeze
    {x}.split({p}, {d})[-1] | split split_with_sizes
    {x}.split([{p}, {x}.shape[{d}] - {p}], {d})[1] | split_with_sizes
    {x}.chunk({p}, {d})[0] | split
    {x}.tensor_split({p}, {d})[-1] | slice
    {x}.unbind({d})[-1] | unbind
    {x}.diagonal({n}, {d}, {d_b}) | diagonal
    {x}.unfold({d}, {p}, {p_b}) | unfold
    {x}.as_strided(({x}.numel() // 2,), (2,)) | as_strided
    {x}.swapaxes({d}, {d_b}) | transpose
    {x}.movedim({d}, {d_b}) | permute
    {x}.view_as({z}) | view
    {x}.detach() | detach
    torch.ops.aten.alias({x}) | alias
    torch.alias_copy({x}) | alias_copy
    torch.as_strided_copy({x}, ({x}.numel() // 2,), (2,)) | as_strided_copy
    torch.detach_copy({x}) | detach_copy
    torch.diagonal_copy({x}, {n}, {d}, {d_b}) | diagonal_copy
    torch.expand_copy({x}, ({p}, *{x}.shape)) | expand_copy
    torch.permute_copy({x}, {perm}) | permute_copy
    torch.select_copy({x}, {d}, {at}) | select_copy
    torch.slice_copy({x}, {d}, {lo}, {hi}) | slice_copy
    torch.split_copy({x}, {p}, {d})[0] | split_copy
    torch.split_with_sizes_copy({x}, [1, {x}.shape[{d}] - 1], {d})[1] | split_with_sizes_copy
    torch.squeeze_copy({x}, {d}) | squeeze_copy
    torch.t_copy({r2}) | t_copy
    torch.transpose_copy({x}, {d}, {d_b}) | transpose_copy
    torch.unbind_copy({x}, {d})[0] | unbind_copy
    torch.unfold_copy({x}, {d}, {p}, {p_b}) | unfold_copy
    torch.unsqueeze_copy({x}, {d}) | unsqueeze_copy
    torch.as_strided_scatter({x}, {x}.reshape(-1)[:{x}.numel() // 2], ({x}.numel() // 2,), (2,)) | as_strided_scatter
    torch.view_copy({x}, {view}) | view_copy
""")  # noqa: E501

SHAPE = rows("""
    {x}.clone() | clone
    {x}.contiguous() | contiguous clone
    torch.cat([{x}, {z}], {d}) | cat
    torch.cat([{x}, {z}, {x}], {d}) | cat
    torch.stack([{x}, {z}], {d}) | stack cat
    torch.hstack([{x}, {z}]) | cat
    {x}.repeat({reps}) | repeat
    {x}.repeat_interleave({p}, {d}) | expand clone
    {x}.tile({reps}) | repeat
    {x}.roll({n}, {d}) | roll
    {x}.roll(({n}, {p}), ({d}, {d_b})) | roll
    torch.rot90({r2}, {n}) | flip transpose
    torch.tril({r2}, {n}) | tril
    torch.triu({r2}, {n}) | triu
    F.pad({x}, ({n}, {n_b})) | constant_pad_nd
    F.pad({x}, ({n}, {n_b}, {p}, {n_c}), value={s}) | constant_pad_nd
    F.pad({r2}, ({p}, {p_b}), mode='reflect') | reflection_pad1d reflection_pad1d_backward
    F.pad({r3}, ({p}, {p_b}, {p_c}, 0), mode='reflect') | reflection_pad2d reflection_pad2d_backward
    F.pad({r4}, (1, 0, {p}, 1, 1, 0), mode='reflect') | reflection_pad3d reflection_pad3d_backward
    F.pad({r2}, ({p}, {p_b}), mode='replicate') | replication_pad1d replication_pad1d_backward
    F.pad({r3}, ({p}, {p_b}, {p_c}, 0), mode='replicate') | replication_pad2d replication_pad2d_backward
    F.pad({r4}, (1, 0, {p}, 1, 1, 0), mode='replicate') | replication_pad3d replication_pad3d_backward
    F.pad({r3}, ({p}, {p_b}), mode='circular') | cat slice
    torch.meshgrid({r1}, {r1_b}, indexing='ij')[1] | expand view
    torch.outer({r1}, {r1_b}) | mul
    torch.kron({r2}, {r2_b}) | mul
    torch.block_diag({r2}, {r2_b}) | constant_pad_nd cat
    F.pixel_shuffle({r4}.repeat(1, 4, 1, 1), 2) | permute
    torch.diag_embed({x}, {n}) | diag_embed where eq
    torch.vander({r1}, 3) | pow
""")  # noqa: E501

INDEXING = rows("""
    {x}[{i}] | index
    {x}[..., {il}] | index
    {x}[:, {il}] | index
    {r2}[{i}, {il}] | index
    {x}[{i}, ..., {il}] | index
    {x}[{i}, {lo}:{hi}] | index slice
    {x}[{i}[:, None], ..., {il}] | index
    torch.ops.aten._unsafe_index({x}, [{i}]) | _unsafe_index
    {x}.index_select({d}, {i}) | index_select
    {x}.gather({d}, {h}) | gather
    torch.take_along_dim({x}, {h}, {d}) | gather
    {x}.take({at_all}) | take
    F.embedding({i}, {r2}) | embedding embedding_dense_backward
    F.embedding({i}, {r2}, padding_idx=0) | embedding embedding_dense_backward
    {x}.index_add({d}, {i}, {src}) | index_add
    {x}.index_add({d}, {i}, {src}, alpha={n}) | index_add
    {x}.index_copy({d}, torch.arange({x}.shape[{d}]).flip(0), {z}) | index_copy
    {x}.index_fill({d}, {i}, {n}) | index_fill
    {x}.index_put(({i},), {src0}, accumulate=True) | index_put
    torch.ops.aten._unsafe_index_put({x}, [{i}], {src0}, True) | _unsafe_index_put
    {x}.index_reduce({d}, {i}, {src}, 'amax') | index_reduce
    {x}.index_reduce({d}, {i}, {src}, 'amin', include_self={c}) | index_reduce
    {f}.index_reduce({d}, {i}, {src}, 'mean', include_self={c}) | index_reduce
    {x}.scatter({d}, {h}, {s}) | scatter
    {x}.scatter({d}, {perm_h}, {z}) | scatter
    {x}.scatter({d}, {h}, {z}, reduce='add') | scatter
    {x}.scatter({d}, {h}, {s}, reduce='multiply') | scatter
    {x}.scatter_add({d}, {h}, {z}) | scatter_add
    {x}.scatter_reduce({d}, {h}, {z}, 'amax', include_self={c}) | scatter_reduce
    {f}.scatter_reduce({d}, {h}, {z}, 'mean') | scatter_reduce
    {x}.scatter_reduce({d}, {h}, {z}, 'sum', include_self={c}) | scatter_reduce
    {x}.put({at_all}, {z}.reshape(-1)[:1].expand({at_all}.shape), accumulate=True) | put
    torch.select_scatter({x}, {z}.select({d}, {at}), {d}, {at}) | select_scatter
    torch.slice_scatter({x}, {z}.narrow({d}, 1, 1), {d}, 1, 2) | slice_scatter
    torch.slice_scatter({x}, {z}[:, {lo}:{hi}], 1, {lo}, {hi}) | slice_scatter
    torch.diagonal_scatter({x}, {z}.diagonal({n}, {d}, {d_b}), {n}, {d}, {d_b}) | diagonal_scatter
    {x}.masked_scatter({m}, {z}) | masked_scatter masked_scatter_backward
    F.embedding_bag({i}, {r2}, torch.tensor([0]), mode='mean') | _embedding_bag _embedding_bag_backward
    F.embedding_bag({i}, {r2}, torch.tensor([0, 1]), mode='sum') | _embedding_bag _embedding_bag_forward_only
    F.embedding_bag({i}, {r2}, torch.tensor([0]), mode='sum', per_sample_weights={r2}[:1, :1].reshape(-1).expand({i}.shape)) | _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
""")  # noqa: E501

CREATION = rows("""
    torch.full({x}.shape, {s}, dtype={t}) | full
    torch.full(({p}, {p_b}), {n}) | full
    torch.full((), {n}, dtype={t}).to({t_b}) | full _to_copy
    torch.full_like({x}, {n}) | full_like
    torch.zeros({x}.shape[-1:], dtype={t}) | zeros
    torch.ones({x}.shape, dtype={t}) | ones
    torch.zeros_like({x}) | zeros_like
    torch.ones_like({x}) | ones_like
    torch.empty_like({x}).fill_({n}) | empty_like fill
    torch.empty({x}.shape).fill_({s}) | empty fill
    torch.empty_strided((3, 2), (1, 3)).fill_({n}) | empty_strided
    torch.empty_permuted((2, 3), (1, 0)).zero_() | empty_permuted
    {x}.new_zeros({x}.shape[:1]) | new_zeros
    {x}.new_ones({x}.shape) | new_ones
    {x}.new_full({x}.shape, {n}) | new_full
    {x}.new_empty({x}.shape).zero_() | new_empty
    {x}.new_empty_strided((2, 3), (1, 2)).zero_() | new_empty_strided
    torch.arange({x}.shape[{d}]) | arange iota
    torch.arange({n}, {p} + 4) | arange
    torch.arange({n}, {p} + 4, {p_b}, dtype={t}) | arange
    torch.arange(0.5, {p} + 4, 0.5) | arange
    torch.linspace(-1, {p}, 7) | iota mul
    torch.eye({x}.shape[0], 3) | eq where
    torch.scalar_tensor({s}) | scalar_tensor
    torch.scalar_tensor({n}, dtype={t}) | scalar_tensor
    torch.tensor({n}) + {x} | lift_fresh_copy add
    torch.tensor([1, 2, 3]) * {n} | lift_fresh lift_fresh_copy mul
    torch.tensor([0.5, -1.0]).to({t}) | lift_fresh_copy _to_copy
    torch.ops.aten.copy({x}, {y}) | copy
    torch.ones({x}.shape).tril() | tril
    torch.ones({x}.shape, dtype=torch.bool).triu(1) | triu
    torch.rand_like({f}) < 2 | rand_like rand lt
    torch.rand({x}.shape) < 2 | rand lt
    torch.randn({x}.shape).abs() * 0 | randn
    torch.randn_like({f}).abs() * 0 | randn_like
    torch.randint(3, 4, {x}.shape) | randint
    torch.randint_like({f}, 3, 4) | randint_like
    torch.randint_like({f}, 1) | randint_like
    torch.randperm({x}.numel() + 1).sort()[0] | randperm sort
    torch.bernoulli(torch.ones_like({f})) | bernoulli
    torch.empty_like({f}).bernoulli_(1.0) | bernoulli
    F.dropout({f}, 0.0) * {q} | native_dropout
    F.dropout({f}, 1.0) | native_dropout
    torch.native_dropout({f}, 0.0, True)[1] | native_dropout
    torch.empty_like({f}).uniform_(2, 2) | uniform
    torch.empty_like({f}).exponential_() >= 0 | exponential ge
    torch.empty_like({f}).geometric_(0.5) >= 1 | geometric
    torch.empty_like({f}).cauchy_().isnan() | cauchy
    torch.empty_like({f}).log_normal_() >= 0 | log_normal
    torch.normal({f}, 0.0).isnan() | normal
    torch.normal({n}, torch.zeros({x}.shape)).abs() * 0 | normal
    torch.empty_like({f}).normal_(2, 0) | normal_functional
""")
