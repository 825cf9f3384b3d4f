"""Operators that compute every element by itself."""

from __future__ import annotations

from dicp.fuzz.row import rows

ARITHMETIC = rows("""
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
    torch.ldexp({f}, torch.tensor({p})) | ldexp
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

UNARY = rows("""
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

ACTIVATION = rows("""
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

JUMPS = rows(
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

BITS = rows("""
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
