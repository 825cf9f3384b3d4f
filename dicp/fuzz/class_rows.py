"""Classes of programs in which operators alone are right: memory formats of images, masks before
a softmax, sizes computed by mathematics, buffers that forward updates, powers of special numbers.
"""

from __future__ import annotations

from dicp.fuzz.row import rows

IMAGES = rows("""
    {r4}.contiguous(memory_format=torch.channels_last) | clone
    {r5}.contiguous(memory_format=torch.channels_last_3d) | clone
    {r4}.to(memory_format=torch.channels_last) + {q} | clone
    {r4}.permute(0, 2, 3, 1) | permute
    {r5}.permute(0, 2, 3, 4, 1) | permute
    torch.cat([{r4}, {z}], 1) | cat
    F.conv2d({r4}, {conv2}, padding={p}) | convolution convolution_backward
    F.conv2d({r4}, {point2}, stride={p}) | convolution convolution_backward
    F.conv2d({r4}, {conv2}, stride={p}, padding={p_b}, dilation={p_c}) | convolution
    F.conv2d({r4}, {deep2}, stride={p}, padding=1, groups={r4}.shape[1]) | convolution
    F.conv2d({r4}.repeat(1, 2, 1, 1), {conv2}.repeat(2, 1, 1, 1), groups=2) | convolution
    F.conv2d({r3}, {unbatched2}) | convolution
    F.conv1d({r3}, {deep1}, padding=1, groups={r3}.shape[1]) | convolution
    F.conv3d({r5}, {conv3}, stride={p}, padding={p_b}) | convolution
    F.conv_transpose2d({r4}, {conv2}.transpose(0, 1), stride={p}, padding=1) | convolution
    F.conv_transpose2d({r4}, {deep2}, padding={p}, groups={r4}.shape[1]) | convolution
    F.conv_transpose3d({r5}, {conv3}.transpose(0, 1), stride={p}) | convolution
    F.batch_norm({r4}, None, None, training=True) | _native_batch_norm_legit native_batch_norm_backward
    F.batch_norm({r4}, {stat}, {stat_b}, {chan}, {chan_b}, training=True, momentum={q}) | _native_batch_norm_legit_functional
    F.batch_norm({r4}, {stat32}, {stat32_b}, training=True) | _native_batch_norm_legit_functional
    F.batch_norm({r4}, {stat}, {stat_b}.abs(), {chan}, None) | _native_batch_norm_legit_no_training
    F.batch_norm({r5}, {stat}, {stat_b}, {chan}, {chan_b}, training=True) | _native_batch_norm_legit_functional
    F.batch_norm({r5}, {stat}, {stat_b}.abs()) | _native_batch_norm_legit_no_training
    F.relu(F.batch_norm(F.conv2d({r4}, {conv2}), None, None, training=True)) | convolution
    F.instance_norm({r5}) | _native_batch_norm_legit native_batch_norm_backward
    F.group_norm({r4}, {r4}.shape[1], {chan}, {chan_b}) | native_group_norm native_group_norm_backward
    F.group_norm({r5}, 1, {chan}) | native_group_norm native_group_norm_backward
    F.layer_norm({r4}, {r4}.shape[1:]) | native_layer_norm native_layer_norm_backward
    F.layer_norm({r4}.permute(0, 2, 3, 1), {r4}.shape[1:2]) | native_layer_norm
    F.pad({r4}, ({p}, 0, 1, {p_b})) | constant_pad_nd
    F.pad({r4}, ({p}, 0, 1, {n}), value={s}) | constant_pad_nd
    F.pad({r5}, ({n}, 0, 1, {p_b}, 0, {p})) | constant_pad_nd
    F.pad({r4}, ({p}, 0, 1, 1), mode='reflect') | reflection_pad2d reflection_pad2d_backward
    F.pad({r4}, ({p}, 0, 1, {p_b}), mode='replicate') | replication_pad2d replication_pad2d_backward
    F.pad({r4}, (1, 0, 1, 1), mode='circular') | cat slice
    F.pad({r5}, (1, 0, 1, 1, 0, 1), mode='reflect') | reflection_pad3d reflection_pad3d_backward
    F.pad({r5}, (1, 0, 1, {p}, 0, 1), mode='replicate') | replication_pad3d replication_pad3d_backward
    F.pad({r5}, (1, 0, 1, 1, 0, 1), mode='circular') | cat slice
    F.avg_pool2d({r4}, ({p}, {p_b}), padding={zero1}) | avg_pool2d avg_pool2d_backward
    F.avg_pool2d({r4}, 2, divisor_override={p}) | avg_pool2d avg_pool2d_backward
    F.max_pool2d({r4}, ({p}, {p_b})) | max_pool2d_with_indices max_pool2d_with_indices_backward
    F.max_pool2d({r3}, {p}) | max_pool2d_with_indices max_pool2d_with_indices_backward
    F.max_pool3d({r5}, {p}, ceil_mode={c}) | max_pool3d_with_indices max_pool3d_with_indices_backward
    F.avg_pool3d({r5}, {p}, {p_b}, ceil_mode={c}) | avg_pool3d avg_pool3d_backward
    F.adaptive_avg_pool2d({r4}, 1) | mean
    F.adaptive_avg_pool2d({r4}, ({p}, None)) | _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    F.adaptive_max_pool2d({r4}, {p}) | adaptive_max_pool2d adaptive_max_pool2d_backward
    {r4}.mean((2, 3), keepdim={c}) | mean
    F.interpolate({r4}, scale_factor=2) | index
    F.interpolate({r4}, scale_factor=(2, 1), mode='nearest-exact') | index
    F.interpolate({r5}, scale_factor=2) | index
    F.interpolate({r4}, scale_factor=2, mode='bilinear', align_corners={c}) | upsample_bilinear2d upsample_bilinear2d_backward
    F.interpolate({r4}, (1, 5), mode='bicubic') | upsample_bicubic2d upsample_bicubic2d_backward
    F.interpolate({r5}, scale_factor=2, mode='trilinear') | upsample_trilinear3d upsample_trilinear3d_backward
    F.interpolate({r4}, scale_factor=0.5, mode='area') | _adaptive_avg_pool2d
    F.channel_shuffle(torch.cat([{r4}, {z}], 1), 2) | channel_shuffle
    F.channel_shuffle(torch.cat([{r5}, {z}], 1), {r5}.shape[1]) | channel_shuffle
    F.pixel_shuffle(torch.cat([{r4}, {z}, {r4}, {z}], 1), 2) | pixel_shuffle
    F.pixel_unshuffle(torch.cat([{r4}, {z}], 2).repeat_interleave(2, 3), 2) | pixel_unshuffle
    torch.zeros_like({r4}) + 1 | zeros_like
    torch.empty_like({r5}).fill_({n}) | empty_like fill
    {r4}.new_zeros({r4}.shape) | new_zeros
    {r4} * {chan}[:, None, None] + {z} | mul add
    {r4}.to({t_float}) | _to_copy
    {r4}.flatten(2).mT | view
    F.dropout2d({r4}, 0.0) * {q} | native_dropout
    F.local_response_norm({r4}, 2) | avg_pool3d
""")  # noqa: E501

MASKS = rows("""
    F.softmax({r3} @ {z}.mT * {q} + {bias}, -1) @ {z_b} | bmm _softmax
    F.softmax({r4} @ {z}.mT + {bias}, -1) @ {z_b} | bmm _softmax
    F.softmax({r4} @ {z}.mT * {q} + {bias} + {bias_b}, -1) @ {z_b} | bmm _softmax
    F.softmax(({r3} @ {z}.mT / {q}).masked_fill({mask}, {low}), -1) @ {z_b} | bmm _softmax masked_fill
    F.softmax(({r4} @ {z}.mT).masked_fill(~{mask}, {low}), -1) @ {z_b} | bmm _softmax masked_fill
    F.softmax(({r4} @ {z}.mT + {bias}).masked_fill({mask}, {low}), -1) @ {z_b} | bmm _softmax
    F.softmax(({r4} @ {z}.mT).masked_fill({mask}, {low}).masked_fill({mask_b}, {low_b}), -1) @ {z_b} | bmm
    F.softmax(torch.where({mask}, {r4} @ {z}.mT * {q}, {low}), -1) @ {z_b} | bmm where
    F.softmax(torch.where({mask}, {low}, {r3} @ {z}.mT), -1) @ {z_b} | bmm where
    F.softmax(({r3} @ {z}.mT).tril({n}), -1) @ {z_b} | bmm tril
    F.softmax(({r3} @ {z}.mT) * {mask}, -1) @ {z_b} | bmm mul
    F.softmax(({r3} @ {z}.mT).masked_fill({mask}, {low}), -1).masked_fill({mask}, 0.0) @ {z_b} | bmm
    F.softmax(({r3} @ {z}.mT).masked_fill({mask}, -inf), -1).nan_to_num(0.0) @ {z_b} | bmm
    F.softmax(({r3} @ {z}.mT).masked_fill({mask}, {low}).to({a}), -1).to({r3}.dtype) @ {z_b} | bmm
    torch.ops.aten._safe_softmax({r4} @ {z}.mT + {bias}, -1) @ {z_b} | bmm _safe_softmax
    F.log_softmax(({r3} @ {z}.mT).masked_fill({mask}, {low}), -1) | _log_softmax
    torch.logsumexp(({r3} @ {z}.mT).masked_fill({mask}, {low}), -1) | logsumexp
    F.softmax(({r2} @ {z}.t()).masked_fill({mask}, {low}), -1) | mm _softmax
    F.softmax(({r2} @ {z}.t()) + {bias}, -1) @ {z_b} | mm _softmax
    F.scaled_dot_product_attention({r3}, {z}, {z_b}, attn_mask={mask}) | bmm
    F.scaled_dot_product_attention({r3}, {z}, {z_b}, attn_mask={bias}, scale={q}) | bmm
    F.scaled_dot_product_attention({r4}, {z}, {z_b}, attn_mask={mask}) | bmm
    F.scaled_dot_product_attention({r4}, {z}, {z_b}, attn_mask={mask}, scale={q}) | bmm
    F.scaled_dot_product_attention({r4}, {z}, {z_b}, attn_mask={bias}) | bmm
    F.scaled_dot_product_attention({r4}, {z}, {z_b}, attn_mask={mask} & {mask_b}) | bmm
    F.scaled_dot_product_attention({r4}, {z}, {z_b}, attn_mask={bias} + {bias_b}) | bmm
    F.scaled_dot_product_attention({r4}, {z}, {z_b}, is_causal=True, scale={q}) | bmm
    F.scaled_dot_product_attention({r4}[:, :, 1:], {z}, {z_b}, is_causal=True) | bmm
    F.scaled_dot_product_attention({r4}[:, :, :1], {z}, {z_b}, attn_mask={mask}[..., :1, :]) | bmm
    F.scaled_dot_product_attention({r4}, {z}[:, :, :2], {z_b}[:, :, :2], attn_mask={bias}[..., :2]) | bmm
    F.scaled_dot_product_attention({r4}, {z}[:, :1], {z_b}[:, :1], attn_mask={mask}, enable_gqa=True) | bmm
    F.scaled_dot_product_attention({r4}, {z}, {z_b}[..., :2], attn_mask={bias}) | bmm
    F.scaled_dot_product_attention({r4}.mT.contiguous().mT, {z}, {z_b}, attn_mask={mask}) | bmm
""")  # noqa: E501

SIZES = rows("""
    {x} * math.sqrt({x}.shape[0]) | mul
    {f} / math.sqrt({f}.shape[-1]) | div
    {f} * (1 / math.sqrt({f}.shape[-1] + {f}.shape[0])) | mul
    {f} + math.log2({f}.shape[{d}] + 1) | add
    {f} * math.exp(-{f}.shape[0]) | mul
    {f} - math.sin({f}.shape[-1]) * {q} | sub
    {x} * (2.0 ** -{x}.shape[-1]) | mul
    {x} + math.floor(math.log2({x}.shape[{d}] + 1)) | add
    {x} + math.floor(math.sqrt({x}.shape[{d}])) | add
    {x} * ({x}.shape[0] % 3) | mul
    {x} * ({x}.shape[-1] // 2 - {x}.shape[0]) | mul
    {x} + max({x}.shape[0], 4) * min({x}.shape[-1], 5) | add
    {x}[:math.ceil(math.sqrt({x}.shape[0]))] | slice
    {x}[math.floor(math.log2({x}.shape[0] + 1)):] | slice
    {x}[..., :int({x}.shape[-1] * 0.5)] | slice
    {x}[..., :int({x}.shape[-1] ** 0.5)] | slice
    {x}[..., math.floor({x}.shape[-1] / 3):math.ceil({x}.shape[-1] / 1.5)] | slice
    {x}.narrow({d}, 0, math.floor(math.sqrt({x}.shape[{d}]))) | slice
    {x}.split(math.ceil({x}.shape[{d}] / 2), {d})[-1] | split split_with_sizes
    torch.arange(math.ceil({x}.shape[0] / 3)) | arange iota
    torch.arange(math.ceil(math.log2({x}.shape[0] + 1)) + 1) | arange iota
    torch.full((math.floor(math.sqrt({x}.numel() + 1)),), {s}) | full
    torch.ones(math.ceil({x}.shape[-1] * 1.5), {p}) | ones
    torch.linspace(0, 1, {x}.shape[0] // 2 + 1) | iota mul
    F.pad({x}, (0, math.ceil({x}.shape[-1] / 4) * 4 - {x}.shape[-1])) | constant_pad_nd
    F.pad({x}, (0, -{x}.shape[-1] % 8)) | constant_pad_nd
    F.interpolate({r3}, math.ceil({r3}.shape[2] * 1.5)) | index
    F.interpolate({r4}, ({r4}.shape[2] * 2, {r4}.shape[3] // 2 + 1), mode='bilinear') | upsample_bilinear2d
    F.avg_pool1d({r3}, math.ceil({r3}.shape[2] / 2)) | avg_pool1d avg_pool2d
    F.softmax({r3} @ {z}.mT / math.sqrt({r3}.shape[-1]), -1) @ {z_b} | bmm _softmax
    F.softmax({r3} @ {z}.mT * ({r3}.shape[-1] ** -0.5), -1) @ {z_b} | bmm _softmax
    {f}.sum({d}) / math.sqrt({f}.numel() + 1) | sum div
    {x}.reshape(-1)[:math.floor(math.sqrt({x}.numel())) ** 2].reshape(math.floor(math.sqrt({x}.numel())), -1) | view
""")  # noqa: E501

BUFFERS = rows("""
    ({count}.add_(1), {f} / ({count} + 10))[1] | add div copy_
    ({count}.add_(1), {f} * {f} * {count})[1] | add mul copy_
    ({count}.add_({n}), {f}.sin() ** 2 + {count})[1] | add copy_
    ({f} * {count}, {count}.add_({n}))[0] | mul add copy_
    ({count}.add_({n}), {count}.mul_(2), {f} * {count})[2] | mul add copy_
    ({average}.mul_(0.9).add_({f}.detach(), alpha=0.1), {f} * {average})[1] | mul add copy_
    ({average}.lerp_({f}.detach(), 0.1), ({f} - {average}) ** 2)[1] | lerp sub copy_
    ({f} * {average}.clone(), {average}.copy_({f}.detach()))[0] | mul copy_
    ({average}.copy_({f}.detach().abs()), {f} / ({average} + {q}))[1] | div copy_
    ({average}.add_({f}.detach().mean() * {q}), {f}.tanh() * {average})[1] | add mul copy_
    ({average}.zero_(), {average}.add_({f}.detach()), {f} * {average})[2] | fill add copy_
    ({r4} * {stat}[:, None, None], {stat}.mul_({q}).add_({r4}.detach().mean((0, 2, 3))))[1] | mul
    ({stat}.mul_({q}).add_({r4}.detach().mean((0, 2, 3))), {r4} * {stat}[:, None, None])[1] | mul
    ({stat}.add_(1), F.batch_norm({r3}, {stat}.detach(), {stat}.abs() + 1, {chan}))[1] | add
    ({count}.add_(1), F.linear({f}, {weight}) / ({count}.abs() + 1))[1] | mm
    ({x}.add_({n}), {x} * {y})[1] | add mul copy_
    ({x} * {n}, {x}.add_({y}))[0] | add mul copy_
    ({x}.clone(), {x}.mul_({s}))[0] | clone mul copy_
    ({x}[{lo}:{hi}].mul_({n}), {y} + {x})[1] | mul slice_scatter copy_
    ({x}.copy_({y}), {y}.add_({n}), {x} + {y})[2] | copy add copy_
""")

SHARED = rows("""
    ({x}.add_({n}), {z} * {s})[1] | add mul copy_
    ({x}.mul_({n}), {z}.clone())[1] | mul clone copy_
    ({x}.zero_(), {z} + {s})[1] | fill add copy_
    ({z} * {n}, {x}.add_({p}), {z} * {x})[2] | add mul copy_
    ({x} * {n}, {z}.add_({p}))[0] | add mul copy_
    ({x}.copy_({z}), {z}.add_({n}), {x} + {z})[2] | copy add copy_
    ({x}[{lo}:{hi}].fill_({n}), {z} - {s})[1] | fill sub slice_scatter copy_
    ({z}.add_({x}), {x}.mul_({n}), {z} - {x})[2] | add sub copy_
    ({x}.mul_({n}), {z}.add_({x}))[1] | mul add copy_
    ({x}.flip(0).add_({n}), {z}.mul_({n_b}), {x} + 1)[2] | add mul copy_
    ({x}.copy_({x}.flip(0)), {z} + 0)[1] | flip copy copy_
    ({x}.cumsum_(0), {z} * {s})[1] | cumsum copy_
""")

POWERS = rows("""
    {o} ** {e} | pow
    torch.pow({o}, {e}) | pow
    torch.pow({x}, {e}) | pow
    torch.pow({o}, {g}) | pow
    torch.pow({e}, {o}) | pow
    torch.pow({e}, {k}) | pow
    torch.pow({o}, {j}) | pow
    torch.pow({k}, {j}.abs()) | pow
    torch.pow({o}, torch.tensor({e})) | pow
    torch.float_power({o}, {e}) | pow
    torch.float_power({k}, {e}) | pow
    {o}.abs() ** {e} | pow
    {o}.to({t_float}) ** {e} | pow
    ({o} + {z}) ** {e} * {q} | pow
    ({o} ** {e}).sum({d}) | pow sum
    {o} ** {e} ** {q} | pow
    1 / {o} | reciprocal
    {o}.square() | square pow
    {o}.sqrt() | sqrt
    {o}.rsqrt() | rsqrt
    {o}.reciprocal() | reciprocal
    {o} * {o} * {o} | mul
    torch.hypot({o}, {z}) | hypot
    {o} / {y} | div true_divide
    torch.atan2({o}, {z}) | atan2
    torch.maximum({o}, {z}) | maximum
    torch.clamp({o}, {n}, {p}) | clamp
    torch.exp({o}) * {q} | exp
    torch.log1p({o}) | log1p
    torch.expm1({o}) | expm1
    torch.xlogy({o}, {z}) | xlogy log mul where eq
    torch.special.xlog1py({o}, {z}) | log1p mul where eq
    torch.sign({o}) * {s} | sign mul
    torch.remainder({o}, {z}) | remainder
    torch.fmod({o}, {z}) | fmod
    {o} + {j} | add
    {o} * {m} | mul
    {o}.amax({d}) | amax
    {o}.max({d}, keepdim={c})[0] | max
    {o}.cumsum({d}) | cumsum
    F.softmax({o}, {d}) | _softmax
    F.log_softmax({o}, {d}) | _log_softmax
    torch.logsumexp({o}, {d}) | logsumexp
    F.layer_norm({o}, {o}.shape[-1:]) | native_layer_norm native_layer_norm_backward
    {o}.std({d}) | std var
    torch.linalg.vector_norm({o}, {p}, {d}) | sum pow
    torch.nan_to_num({o}, {n}, {s}) | nan_to_num
    torch.sinc({o}) | sin where
""")
