"""Operators of libraries, patterns that the passes look for, changes in place."""

from __future__ import annotations

from dicp.fuzz.row import rows

LIBRARY = rows("""
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
    F.pdist(F.pad({r2}, (0, 0, 1, 0))) | _pdist_forward _pdist_backward
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

POOLING = rows("""
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

PATTERNS = rows("""
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
""") + rows(  # noqa: E501
    """
    ({f} * 4).round().clamp(-8, 7).to(torch.int8).to({t_float}) * 0.25 | _to_copy round
    torch.where({f} > {s}, {f}, {z}).sum({d}) | where gt
    {f}.topk(1, {d})[1] + {f}.argmax({d}, keepdim=True) | topk argmax
    """,
    exact=True,
)
"""What the passes on graphs look for, and near misses of it."""

IN_PLACE = rows(
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
    {f}.div_({q}) | div
    {f}.pow_(2) | pow
    {f}.lerp_({z}, {q}) | lerp
    {f}.addcmul_({z}, {z_b}, value={s}) | addcmul
    {f}.addcdiv_({z}, {z_b}.abs() + 1) | addcdiv
    {f}.nan_to_num_({n}) | nan_to_num
    torch._foreach_add_([{f}], {z}.sum()) | add
    torch._foreach_mul_([{f}], {s}) | mul
    """,
    outs=0,
)
