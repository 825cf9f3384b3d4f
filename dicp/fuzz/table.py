"""The operators that programs are made of: one row each, with the lowering rules that it reaches.

A template is Python source. A slot `{kind}` or `{kind_anything}` is drawn by the function of that
kind in `dicp.fuzz.slots`; the first tensor slot is the subject that shapes of the others follow:

    x any dtype, f float, k integer, b bool, r2 float of rank 2     the subject
    y as the subject, broadcastable; z exactly its shape and dtype
    g float, j integer, m bool, broadcastable; w bool of exactly its shape
    d dimension, dd dimensions, s scalar, q positive scalar, n small integer, p positive one, c bool
    t another dtype (a cast), t_float a floating point one, a dtype to accumulate in
    i indices of the first dimension, il of the last, h of the subject's shape, along d

A row that is not valid for the values drawn raises in eager and is drawn anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One way to write an operator.

    rules: names of ATen operators that it may reach, forward and backward. exact: its result jumps,
    so that operands with rounding errors would make any difference right. outs: how many results;
    0 for a change in place.
    """

    template: str
    rules: tuple[str, ...]
    exact: bool = False
    outs: int = 1

    @property
    def slots(self) -> tuple[str, ...]:
        """In the order in which they are drawn: the subject first."""
        found = dict.fromkeys(re.findall(r"{(\w+)}", self.template))
        return tuple(sorted(found, key=lambda slot: not re.match(r"([xfkb]|f32|r\d)(_|$)", slot)))


def _rows(text: str, exact: bool = False, outs: int = 1) -> list[Row]:
    """Rows from lines `template | rule rule`; without rules, the operator of the template's name"""
    rows = []
    for line in filter(None, map(str.strip, text.splitlines())):
        template, _, rules = line.partition(" | ")
        called = re.findall(r"(?:torch|F|\})\.(\w+)\(", template)
        names = rules.split() if rules else [called[0].removesuffix("_")]
        rows.append(Row(template.strip(), tuple(names), exact, outs))
    return rows


ARITHMETIC = _rows("""
    {x} + {y} | add
    torch.add({x}, {y}, alpha={n}) | add
    {x} + {s} | add
    {x} - {y} | sub
    torch.sub({x}, {y}, alpha={n}) | sub
    {s} - {x} | rsub sub
    torch.rsub({x}, {y}) | rsub sub
    {x} * {y} | mul
    {x} * {s} | mul
    torch.div({f}, {g}.abs() + 0.5) | div true_divide abs
    {x} / {q} | div true_divide
    {q} / ({x}.abs() + 1) | reciprocal mul
    torch.maximum({x}, {y})
    torch.minimum({x}, {y})
    torch.fmax({f}, {g})
    torch.fmin({f}, {g})
    torch.clamp({x}, {n}, {p}) | clamp
    torch.clamp({x}, max={n}) | clamp clamp_max
    torch.clamp({x}, min={s}) | clamp clamp_min
    torch.clamp({x}, {y}, {z}) | clamp maximum minimum
    torch.clamp_min({x}, {y}) | clamp_min maximum
    torch.clamp_max({x}, {y}) | clamp_max minimum
    torch.addcmul({f}, {g}, {g_b}, value={s})
    torch.addcdiv({f}, {g}, {g_b}.abs() + 1, value={s})
    torch.lerp({f}, {z}, {q}) | lerp
    torch.lerp({f}, {z}, {z_b}) | lerp
    torch.hypot({f}, {g})
    torch.square({x}) | square pow
    torch.pow({f}, {n}) | pow
    torch.pow({f}.abs() + 0.1, {s}) | pow
    torch.pow({f}.abs() + 0.5, {g}) | pow
    torch.pow({q}, {f}) | pow
    torch.pow({k}, {p}) | pow
    torch.float_power({x}.abs() + 1, {p}) | pow
    torch.where({m}, {x}, {y}) | where
    torch.where({m}, {x}, {s}) | where
    torch.where({b}, {n}, {p}) | where
    {x}.masked_fill({m}, {s}) | masked_fill
    {x}.masked_fill({m}, torch.tensor({n})) | masked_fill
    torch.copysign({f}, {g}.nan_to_num()) | copysign
    torch.copysign({f}, {s})
    torch.atan2({f}, {g})
    torch.abs({x})
    torch.neg({x})
    torch.nan_to_num({f}) | nan_to_num
    torch.nan_to_num({f}, {n}, {s}, {n_b}) | nan_to_num
    torch.fill({x}, {s}) | fill full_like
    {f}.to({t_float}) | _to_copy convert_element_type
    {f}.to({t_float}).to({t_float_b}) | _to_copy convert_element_type
    torch.xlogy({f}, {g}.abs() + 0.1) | xlogy log mul where eq
    torch.special.xlog1py({f}, {g}.abs()) | log1p mul where eq
""")

UNARY = _rows("""
    torch.acos(torch.tanh({f}) * 0.9)
    torch.acosh({f}.abs() + 1.5)
    torch.asin(torch.tanh({f}) * 0.9)
    torch.asinh({f})
    torch.atan({x})
    torch.atanh(torch.tanh({f}) * 0.9)
    torch.cos({x})
    torch.cosh({f})
    torch.digamma({f}.abs() + 0.5)
    torch.erf({x})
    torch.erfc({f})
    torch.erfinv(torch.tanh({f}) * 0.9)
    torch.exp({x})
    torch.exp(-{f}.abs()) | exp
    torch.exp2({f})
    torch.expm1({f})
    torch.lgamma({f}.abs() + 0.5)
    torch.log({x}.abs() + 0.5)
    torch.log({f}) | log
    torch.log10({f}.abs() + 0.5)
    torch.log1p({f}.abs())
    torch.log2({f}.abs() + 0.5)
    torch.reciprocal({x}.abs() + 0.5)
    torch.rsqrt({x}.abs() + 0.5)
    torch.sigmoid({x}) | sigmoid sigmoid_backward
    torch.sin({x})
    torch.sinh({f})
    torch.sqrt({x}.abs() + 0.1)
    torch.tan(torch.tanh({f}))
    torch.tanh({x}) | tanh tanh_backward
    torch.logit(torch.sigmoid({f}), 0.01) | log
    torch.sinc({f}) | sin where
    torch.i0({f}) | i0 bessel_i0
    torch.special.i0e({f}) | special_i0e bessel_i0e
    torch.special.i1({f}) | special_i1
    torch.special.i1e({f}) | special_i1e
    torch.special.bessel_j0({f}) | special_bessel_j0
    torch.special.bessel_j1({f}) | special_bessel_j1
    torch.special.ndtri(torch.sigmoid({f})) | special_ndtri ndtri
    torch.special.log_ndtr({f}) | special_log_ndtr
    torch.special.erfcx({f}.abs()) | special_erfcx
    torch.special.entr({f}.abs()) | special_entr
    torch.special.zeta({f}.abs() + 1.5, {g}.abs() + 1) | special_zeta
    torch.polygamma(1, {f}.abs() + 0.5) | polygamma
    torch.igamma({f}.abs() + 0.5, {g}.abs() + 0.5) | igamma
    torch.igammac({f}.abs() + 0.5, {g}.abs() + 0.5) | igammac
""")

ACTIVATION = _rows("""
    F.relu({x}) | relu threshold_backward
    F.relu6({f}) | relu6 hardtanh
    F.gelu({f}) | gelu gelu_backward
    F.gelu({f}, approximate='tanh') | gelu gelu_backward
    F.silu({f}) | silu silu_backward
    F.mish({f}) | mish mish_backward
    F.elu({f}, {q}) | elu elu_backward
    F.selu({f}) | elu elu_backward
    F.celu({f}, {q}) | elu elu_backward
    F.leaky_relu({f}, {q}) | leaky_relu leaky_relu_backward
    F.hardtanh({f}, -{q}, {q_b}) | hardtanh hardtanh_backward
    F.hardsigmoid({f}) | hardsigmoid hardsigmoid_backward
    F.hardswish({f}) | hardswish hardswish_backward
    F.logsigmoid({f}) | log_sigmoid_forward log_sigmoid_backward
    F.softplus({f}, {q}, {q_b}) | softplus softplus_backward
    F.softsign({f}) | div abs
    F.threshold({x}, {s}, {n}) | threshold threshold_backward
    F.prelu({f}, {one}) | _prelu_kernel _prelu_kernel_backward
    F.glu(torch.cat([{f}, {z}], {d}), {d}) | glu cat
    F.softmax({f}, {d}) | _softmax _softmax_backward_data
    F.softmax({f}.masked_fill({m}, -inf), {d}) | _softmax masked_fill
    torch.ops.aten._safe_softmax({f}.masked_fill({m}, -inf), {d}) | _safe_softmax
    F.log_softmax({f}, {d}) | _log_softmax _log_softmax_backward_data
    F.softmin({f}, {d}) | _softmax neg
    F.soft_margin_loss({f}, torch.ones_like({f})) | soft_margin_loss_backward
    F.mse_loss({f}, {z}) | mean
    F.smooth_l1_loss({f}, {z}) | mean
    F.huber_loss({f}, {z}, delta={q}) | mean
    F.binary_cross_entropy_with_logits({f}, torch.sigmoid({z})) | mean
    F.kl_div(F.log_softmax({f}, {d}), F.softmax(1 - {z}, {d})) | mean
    F.cosine_similarity({f}, {z}, {d}) | sum
    F.normalize({f}, dim={d}) | sum
    F.cross_entropy({r2}, {classes}) | nll_loss_forward nll_loss_backward
    F.nll_loss({r2}, {classes}, reduction='none') | nll_loss_forward nll_loss_backward
    F.cross_entropy({r2}, {classes}, ignore_index=0) | nll_loss_forward nll_loss_backward
""")

JUMPS = _rows(
    """
    torch.ceil({x})
    torch.floor({x})
    torch.trunc({x}) | trunc fix
    torch.round({x}) | round
    torch.round({f}, decimals={n}) | round
    torch.frac({f}) | trunc sub
    torch.sign({x})
    torch.signbit({x}.nan_to_num()) | signbit
    torch.sgn({x}) | sign
    torch.isinf({x})
    torch.isnan({x})
    torch.isfinite({x}) | isinf
    torch.heaviside({x}, {z}) | heaviside eq where
    {x} == {y} | eq
    {x} != {y} | ne
    {x} > {y} | gt
    {x} >= {y} | ge
    {x} < {y} | lt
    {x} <= {y} | le
    {x} == {s} | eq
    {x} != {n} | ne
    {x} > {s} | gt
    {x} >= {n} | ge
    {x} < {n} | lt
    {x} <= {s} | le
    torch.isclose({f}, {g}) | le abs
    torch.div({x}, {y}.abs() + 1, rounding_mode='floor') | div
    torch.div({x}, {y}.abs() + 1, rounding_mode='trunc') | div
    torch.div({x}, {p}, rounding_mode='floor') | div
    torch.div({x}, {q}, rounding_mode='trunc') | div
    torch.floor_divide({x}, {y}.abs() + 1)
    {x} // {p} | floor_divide
    {s} // ({x}.abs() + 1) | floor_divide
    torch.fmod({x}, {y}.abs() + 1)
    torch.fmod({x}, {q})
    torch.remainder({x}, {y}.abs() + 1)
    {x} % {p} | remainder
    {n} % ({x}.abs() + 1) | remainder
    torch.nextafter({f}, {z})
    torch.logical_and({x}, {y})
    torch.logical_or({x}, {y})
    torch.logical_xor({x}, {y})
    torch.logical_not({x})
    {x}.to({t}) | _to_copy convert_element_type
    {x}.to({t}).to({t_b}) | _to_copy convert_element_type
    {x}.bool() | ne _to_copy
    {k}.to({t}) + {s} | _to_copy add
    torch.all({x}) | all
    torch.all({x}, {d}, keepdim={c}) | all
    torch.any({x}) | any
    torch.any({x}, {d}, keepdim={c}) | any
    torch.any({x}, {dd}) | any
    torch.argmax({x}, {d}, keepdim={c}) | argmax
    torch.argmin({x}, {d}, keepdim={c}) | argmin
    torch.argmax({x}) | argmax
    torch.argmin({x}) | argmin
    torch.count_nonzero({x}, {d}) | sum ne
    torch.sort({x}, dim={d}, stable=True)[1] | sort
    torch.searchsorted(torch.sort({r1}).values, {g}, right={c}) | searchsorted sort
    torch.searchsorted(torch.sort({r1}).values, {s}) | searchsorted
    torch.bucketize({f}, torch.tensor([-1.0, 0.0, 1.5]), right={c}) | bucketize
    torch.bucketize({s}, {r1}.sort().values) | bucketize
    torch.isin({k}, {j}) | eq any
    torch.histc({f32}, 5, -2, 2) | histc
    {b}.long().cumsum({d}) | cumsum
    F.one_hot({k} % 5, 5) | eq scatter
    torch.eq({x}, {y}).sum({d}) | eq sum
    torch.mode({x}, {d})[0] | mode
    torch.cdist({r2}, {r2} + 1) > 1 | _cdist_forward
    """,
    exact=True,
)

BITS = _rows("""
    {k} & {j} | bitwise_and
    {k}.__or__({j}) | bitwise_or
    {k} ^ {j} | bitwise_xor
    {k} & {n} | bitwise_and
    torch.bitwise_or({k}, {n})
    torch.bitwise_xor({n}, {k})
    {b} & {m} | bitwise_and
    {b} ^ {m} | bitwise_xor
    ~{k} | bitwise_not
    ~{b} | bitwise_not
    {k} << {p} | __lshift__ bitwise_left_shift
    {k} >> {p} | __rshift__ bitwise_right_shift
    torch.bitwise_left_shift({k}, {j} % 4)
    torch.bitwise_right_shift({k}, {j} % 4)
    torch.bitwise_left_shift({n}, {k} % 4)
    torch.bitwise_right_shift({n}, {k} % 4)
    torch.ops.aten.__lshift__({k}, {p}) | __lshift__
    torch.ops.aten.__rshift__({k}, {p}) | __rshift__
    torch.gcd({k}, {j}) | remainder
""")

REDUCTION = _rows("""
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

REDUCTION_PAIRS = _rows(
    """
    torch.var_mean({f}, {dd}, correction={c}, keepdim={c_b}) | var_mean
    torch.std_mean({f}, {dd}, correction={c}) | std_mean
    torch.aminmax({x}) | amin amax
    """,
    outs=2,
) + _rows(
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

VIEWS = _rows("""
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

SHAPE = _rows("""
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
    torch.diag_embed({x}, {n}) | where eq
    torch.vander({r1}, 3) | pow
""")  # noqa: E501

INDEXING = _rows("""
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

CREATION = _rows("""
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

LIBRARY = _rows("""
    {r2} @ {mat} | mm
    {r2}.t() @ {r2_b}[:1].expand({r2}.shape[0], -1) | mm
    torch.addmm({r2} @ {mat}, {r2}, {mat}, beta={n}, alpha={s}) | addmm
    torch.addmv({r2}[:, 0], {r2}, {vec}) | addmv mv
    torch.addr({r2}, {r2}[:, 0], {r2}[0]) | addr
    {r2} @ {vec} | mv
    torch.dot({r1}, {z}) | dot
    torch.vdot({r1}, {z}) | vdot
    torch.bmm({r3}, {r3}.mT) | bmm
    torch.baddbmm({r3} @ {mat}, {r3}, {r3}.mT @ {r3} @ {mat}) | baddbmm
    torch.addbmm({r3}[0] @ {mat}, {r3}, {r3}.mT @ ({r3} @ {mat})) | addbmm
    torch.matmul({f}, {mat}) | mm bmm
    F.linear({f}, {weight}) | mm
    F.linear({f}, {weight}, {weight}[:, 0]) | addmm
    F.relu(F.linear({f}, {weight}, {weight}[:, 0])) | addmm
    F.gelu({f} @ {mat}) + {q} | mm
    torch.ops.aten._trilinear({r2}, {z}, {z_b}, [], [], [], []) | _trilinear
    F.bilinear({r2}, {z}, {r3}[:, :1, :1].expand(-1, {r2}.shape[1], {r2}.shape[1])) | bmm
    torch.einsum('...ij,...kj->...ik', {f}, {z}) | bmm
    F.conv1d({r3}, {conv1}) | convolution convolution_backward
    F.conv1d({r3}, {conv1}, stride={p}, padding={p_b}, dilation={p_c}) | convolution
    F.conv2d({r4}, {conv2}) | convolution convolution_backward
    F.conv2d({r4}, {conv2}, {conv2}[:, 0, 0, 0], stride={p}, padding={p_b}) | convolution
    F.relu(F.conv2d({r4}, {conv2}, padding=1)) + {q} | convolution
    F.conv2d({r4}, {deep2}, padding=1, groups={r4}.shape[1]) | convolution convolution_backward
    F.conv3d({r5}, {conv3}, padding=1) | convolution
    F.conv_transpose1d({r3}, {conv1}.transpose(0, 1), stride={p}) | convolution
    F.conv_transpose2d({r4}, {conv2}.transpose(0, 1), stride={p}, output_padding=0) | convolution
    F.scaled_dot_product_attention({r3}, {z}, {z_b}) | bmm _softmax
    F.scaled_dot_product_attention({r4}, {z}, {z_b}) | _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    F.scaled_dot_product_attention({r4}, {z}, {z_b}, is_causal=True) | _scaled_dot_product_flash_attention_for_cpu
    F.scaled_dot_product_attention({r3}, {z}, {z_b}, attn_mask=({r3} @ {r3}.mT) > -inf) | _safe_softmax
    F.softmax({r3} @ {z}.mT * {q}, -1) @ {z_b} | bmm _softmax
    torch.cdist({r2}, {r2_b}[:, :1].expand(-1, {r2}.shape[1])) | _cdist_forward _cdist_backward
    F.pdist({r2}) | _pdist_forward _pdist_backward
    F.layer_norm({f}, {f}.shape[-1:]) | native_layer_norm native_layer_norm_backward
    F.layer_norm({f}, {f}.shape[-1:], {last}, {last_b}, {q}) | native_layer_norm native_layer_norm_backward
    F.rms_norm({f}, {f}.shape[-1:], {last}) | _fused_rms_norm
    F.group_norm({r4}, 1) | native_group_norm native_group_norm_backward
    F.group_norm({r3}.repeat(1, 2, 1), 2) | native_group_norm native_group_norm_backward
    F.batch_norm({r4}, {chan}.detach(), {chan_b}.detach().abs(), training=False) | _native_batch_norm_legit_no_training
    F.batch_norm({r4}, None, None, {chan}, {chan_b}, training=True) | _native_batch_norm_legit native_batch_norm_backward
    F.batch_norm({r3}, {chan}.detach() * 1, {chan_b}.detach().abs(), training=True) | _native_batch_norm_legit_functional
    F.instance_norm({r4}) | _native_batch_norm_legit native_batch_norm_backward
""")  # noqa: E501

POOLING = _rows("""
    F.avg_pool1d({r3}, 2, {p}) | avg_pool1d avg_pool2d
    F.avg_pool2d({r4}, 2, {p}, 1, {c}, {c_b}) | avg_pool2d avg_pool2d_backward
    F.avg_pool2d({r4}, (2, 3), count_include_pad={c}) | avg_pool2d avg_pool2d_backward
    F.avg_pool3d({r5}, 2, {p}) | avg_pool3d avg_pool3d_backward
    F.max_pool1d({r3}, 2, {p}) | max_pool2d_with_indices
    F.max_pool2d({r4}, 2, {p}, {zero1}, ceil_mode={c}) | max_pool2d_with_indices max_pool2d_with_indices_backward
    F.max_pool2d({r4}, 3, 2, 1, {p}) | max_pool2d_with_indices max_pool2d_with_indices_backward
    F.max_pool3d({r5}, 2, {p}) | max_pool3d_with_indices max_pool3d_with_indices_backward
    F.adaptive_avg_pool1d({r3}, {p}) | adaptive_avg_pool1d _adaptive_avg_pool2d
    F.adaptive_avg_pool2d({r4}, ({p}, {p_b})) | _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    F.adaptive_avg_pool3d({r5}, {p}) | _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    F.adaptive_max_pool2d({r4}, ({p}, {p_b})) | adaptive_max_pool2d adaptive_max_pool2d_backward
    F.adaptive_max_pool3d({r5}, {p}) | adaptive_max_pool3d adaptive_max_pool3d_backward
    torch.ops.aten.fractional_max_pool2d({r4}, [2, 2], [1, 1], torch.full({r4}.shape[:2] + (2,), 0.5, dtype={r4}.dtype))[0] | fractional_max_pool2d fractional_max_pool2d_backward
    torch.ops.aten.fractional_max_pool3d({r5}, [2, 2, 2], [1, 1, 1], torch.full({r5}.shape[:2] + (3,), 0.5, dtype={r5}.dtype))[0] | fractional_max_pool3d fractional_max_pool3d_backward
    F.lp_pool2d({r4}, 2, 2) | avg_pool2d
    F.interpolate({r3}, scale_factor=2) | index
    F.interpolate({r3}, {r3}.shape[2] + {p}) | upsample_nearest1d_backward
    F.interpolate({r4}, ({p}, 5)) | upsample_nearest2d_backward
    F.interpolate({r5}, (2, 3, {p})) | upsample_nearest3d_backward
    F.interpolate({r3}, 5, mode='nearest-exact') | _upsample_nearest_exact1d_backward
    F.interpolate({r4}, (3, 4), mode='nearest-exact') | _upsample_nearest_exact2d_backward
    F.interpolate({r5}, (3, 2, 4), mode='nearest-exact') | _upsample_nearest_exact3d_backward
    F.interpolate({r3}, 6, mode='linear', align_corners={c}) | upsample_linear1d upsample_linear1d_backward
    F.interpolate({r4}, (5, 3), mode='bilinear', align_corners={c}) | upsample_bilinear2d upsample_bilinear2d_backward
    F.interpolate({r4}, scale_factor=1.5, mode='bilinear') | upsample_bilinear2d upsample_bilinear2d_backward
    F.interpolate({r4}, (5, 3), mode='bilinear', antialias=True) | _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    F.interpolate({r4}, (5, 3), mode='bicubic', align_corners={c}) | upsample_bicubic2d upsample_bicubic2d_backward
    F.interpolate({r4}, (5, 3), mode='bicubic', antialias=True) | _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
    F.interpolate({r5}, (3, 2, 4), mode='trilinear') | upsample_trilinear3d upsample_trilinear3d_backward
    F.grid_sample({r4}, torch.tanh({r4}[:, :1, :, :1].permute(0, 2, 3, 1).expand(-1, -1, 3, 2)), align_corners={c}) | grid_sampler_2d grid_sampler_2d_backward
    F.grid_sample({r5}, torch.tanh({r5}[:, :1, :, :1, :1].permute(0, 2, 3, 4, 1).expand(-1, -1, 2, 2, 3)), align_corners=False) | grid_sampler_3d grid_sampler_3d_backward
    F.unfold({r4}, 2) | index
    F.max_unpool1d(*F.max_pool1d({r3}, 2, return_indices=True), 2) | max_unpool2d
    F.max_unpool2d(*F.max_pool2d({r4}, 2, return_indices=True), 2) | max_unpool2d
    F.max_unpool3d(*F.max_pool3d({r5}, 2, return_indices=True), 2) | max_unpool3d
""")  # noqa: E501

PATTERNS = _rows("""
    {f} * torch.rsqrt({f}.square().mean({d}, keepdim=True) + {q}) | rsqrt mean
    {f}.to({a}) * torch.rsqrt({f}.to({a}).pow(2).mean(-1, keepdim=True) + {q}) | rsqrt mean
    F.rms_norm({f}.to({t_float}), {f}.shape[-1:]) | rsqrt mean _to_copy
    ({f} - {f}.mean({d}, keepdim=True)) / ({f}.var({d}, correction=0, keepdim=True) + {q}).sqrt() | var
    ({f} - {f}.mean(-1, keepdim=True)) * torch.rsqrt(({f} - {f}.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + {q}) | rsqrt
    F.layer_norm({f} + {z}, {f}.shape[-1:]) + {q} | native_layer_norm add
    {f} * 0.5 * (1 + torch.erf({f} * 0.7071067811865476)) | erf
    {f} * 0.5 * (1 + torch.erf({f} * {s})) | erf
    0.5 * {f} * (1 + torch.tanh(0.7978845608028654 * ({f} + 0.044715 * {f} ** 3))) | tanh
    0.5 * {f} * (1 + torch.tanh({q} * ({f} + {q_b} * {f} ** {p}))) | tanh
    {f} * torch.sigmoid({q} * {f}) | sigmoid
    F.silu({f}) * {z} | silu
    F.gelu({f}.to({t_float})) | gelu
    torch.exp({f} - {f}.amax({d}, keepdim=True)) / torch.exp({f} - {f}.amax({d}, keepdim=True)).sum({d}, keepdim=True) | exp
    torch.exp({f} - {f}.amax({d}, keepdim=True)) / torch.exp({f} - {f}.amax({d}, keepdim=True)).sum({d_b}, keepdim=True) | exp
    {f}.exp() / {f}.exp().sum({d}, keepdim=True) | exp
    torch.log({f}.exp().sum({d})) | logsumexp
    F.softmax({r3} @ {z}.mT * {q} + {r3}[:1, :, :1], {d}) @ {z_b} | bmm _softmax
    F.softmax(({r3} @ {z}.mT / {q}).masked_fill(torch.ones({r3}.shape[1], {r3}.shape[1], dtype=torch.bool).triu({n}), -inf), -1) @ {z_b} | bmm triu
    F.softmax(({r4} @ {z}.mT).masked_fill(torch.ones({r4}.shape[2], {r4}.shape[2], dtype=torch.bool).triu({p}), {s}), -1) @ {z_b} | bmm triu
    F.softmax({r4} @ {z}.transpose({d}, {d_b}) * {q}, -1) @ {z_b} | bmm _softmax
    F.scaled_dot_product_attention({r4}, {z}, {z_b}, attn_mask=torch.ones({r4}.shape[2], {r4}.shape[2], dtype=torch.bool).tril({n})) | bmm tril
    F.scaled_dot_product_attention({r4}, {z}[:, :1], {z_b}[:, :1], enable_gqa=True, scale={q}) | bmm
    F.scaled_dot_product_attention({r4}, {z}, {z_b}, attn_mask={r4}[:, :, :, :1]) | bmm
    -F.log_softmax({r2}, -1).gather(1, {classes}[:, None]).mean() | _log_softmax gather
    torch.cat([-{f}[..., {f}.shape[-1] // 2:], {f}[..., :{f}.shape[-1] // 2]], -1) * {z} + {f} * {z_b} | cat
    F.relu(F.linear({f}, {weight}, {weight}[:, 0])) + {q} | addmm
    F.silu(F.linear({f}, {weight})) * F.linear({f}, {weight_b}) | mm
    F.normalize({f}, p={p}, dim={d}) * {z} | sum
    {f}.repeat_interleave({p}, {d}).sum({d_b}) | expand
    torch.where({m}, {f}, torch.zeros_like({f})).sum({d}) / {m}.sum().clamp(min=1) | where sum
""") + _rows(  # noqa: E501
    """
    ({f} * 4).round().clamp(-8, 7).to(torch.int8).to({t_float}) * 0.25 | _to_copy round
    torch.where({f} > {s}, {f}, {z}).sum({d}) | where gt
    {f}.topk(1, {d})[1] + {f}.argmax({d}, keepdim=True) | topk argmax
    """,
    exact=True,
)
"""What the passes on graphs look for, and near misses of it."""

IN_PLACE = _rows(
    """
    {x}.add_({y}) | add copy_
    {x}.mul_({s}) | mul copy_
    {f}.sub_({g}, alpha={n}) | sub
    {x}.copy_({y}) | copy copy_
    {x}.fill_({n}) | fill
    {x}.zero_() | fill
    {x}[{lo}:{hi}] = {s} | slice_scatter copy fill
    {x}[..., {lo}:{hi}] += {n} | slice_scatter
    {x}[:, {lo}:{hi}] = {y}[:, {lo}:{hi}] | slice_scatter
    {x}[{lo}] = {n} | select_scatter
    {x}[{i}] = {n} | index_put
    {x}.masked_fill_({m}, {n}) | masked_fill
    {x}[{w}] = {n} | index_put masked_fill
    {x}.select({d}, {at}).mul_({n}) | select_scatter
    {x}.transpose({d}, {d_b}).add_({n}) | transpose
    {x}.diagonal({n}, {d}, {d_b}).fill_({p}) | diagonal_scatter
    {x}.unsqueeze({d}).mul_({n}) | unsqueeze
    {x}.view({view}).add_({n}) | view
    {x}.index_add_({d}, {i}, {src}) | index_add
    {x}.scatter_({d}, {h}, {n}) | scatter
    {f}.relu_() | relu
    {f}.sigmoid_() | sigmoid
    {f}.exp_() | exp
    {x}.clamp_({n}, {p}) | clamp
    {x}.neg_() | neg
    {x}.index_fill_({d}, {i}, {n}) | index_fill
    {x}.tril_() | tril
    {x}.cumsum_({d}) | cumsum
    """,
    outs=0,
)

UNDRAWN = {
    "fma": "PyTorch's decompositions alone write it, in the gradient of softmax",
    "_ctc_loss": "PyTorch's front end refuses it in one graph: its shape depends on data",
    "_ctc_loss_backward": "as for its forward",
    "_efficientzerotensor": "PyTorch writes it for gradients that are zero, which it mostly omits",
    "copy_strided": "PyTorch writes it for sizes that depend on data",
    "_grouped_mm": "it takes offsets that depend on data, whole batches in bfloat16",
    "linear": "frozen graphs have it, of constant weights",
    **dict.fromkeys(
        (
            *(
                f"_scaled_dot_product_{kind}_attention{way}"
                for kind in ("flash", "efficient", "cudnn")
                for way in ("", "_backward")
            ),
            *(
                f"_{kind}_attention_{way}"
                for kind in ("flash", "efficient", "cudnn")
                for way in ("forward", "backward")
            ),
        ),
        "a GPU's tensors alone reach it; on the CPU attention is drawn as another operator",
    ),
}
"""Operators with a lowering rule that no row reaches, with the reason."""

ROWS: tuple[Row, ...] = (
    *ARITHMETIC,
    *UNARY,
    *ACTIVATION,
    *JUMPS,
    *BITS,
    *REDUCTION,
    *REDUCTION_PAIRS,
    *VIEWS,
    *SHAPE,
    *INDEXING,
    *CREATION,
    *LIBRARY,
    *POOLING,
    *PATTERNS,
    *IN_PLACE,
)
