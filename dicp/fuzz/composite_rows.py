"""Functions of PyTorch that are several operators: what users write, and what it is made of."""

from __future__ import annotations

from dicp.fuzz.row import rows

COMPOSITES = rows("""
    torch.tensordot({r2}, {mat}, 1) | mm
    torch.linalg.norm({r2}, 1) | abs sum amax
    torch.linalg.matrix_norm({r3}, keepdim={c}) | sum pow
    torch.nanmean({f}, {d}, keepdim={c}) | isnan where sum
    torch.quantile({f}.float(), 0.3, {d}) | sort gather
    torch.nanquantile({f}.float(), {q} / 4, {d}, keepdim={c}) | sort gather
    torch.renorm({r2}, 2, 0, {q}) | sum pow where
    torch.trapezoid({f}, dim={d}) | slice add sum
    torch.cumulative_trapezoid({f}, dim={d}) | slice add cumsum
    torch.gradient({r2}, dim={d})[0] | slice sub cat
    torch.logaddexp({f}, {g})
    torch.logaddexp2({f}, {g})
    torch.deg2rad({x}) | mul
    torch.positive({x}) | alias
    torch.lcm({k}, {j}) | gcd
    torch.cartesian_prod({r1}, {r1_b}) | expand stack
    torch.broadcast_tensors({x}, {y})[0] | expand
    torch.column_stack([{x}, {z}]) | cat
    torch.dstack([{x}, {z}]) | cat
    torch.unflatten({x}, {d}, (1, -1)) | view
    {x}.type_as({y}) + {y} | _to_copy
    {k}.view(torch.int8) | view
    {b}.view(torch.uint8) | view
    torch.msort({x}) | sort
    torch.fliplr({r2}) | flip
    torch.hsplit({r2}, 1)[0] | slice
    torch._foreach_add([{f}, {z}], {s})[1] | add
    torch._foreach_mul([{f}, {z}], [{z}, {f}])[0] | mul
    torch._foreach_lerp([{f}], [{z}], {q})[0] | lerp
    torch._foreach_norm([{f}, {z}])[1] | sum pow
    F.softshrink({f}, {q}) | softshrink softshrink_backward
    F.hardshrink({f}, {q}) | hardshrink hardshrink_backward
    F.tanhshrink({f}) | tanh sub
    F.fold(F.unfold({r4}, 2, padding={zero1}), {r4}.shape[2:], 2, padding={zero1}) | im2col col2im
    F.adaptive_max_pool1d({r3}, {p}) | adaptive_max_pool2d
    F.pairwise_distance({f}, {z}) | sub sum
    F.cosine_similarity({f}, {z}, {d}) | mul sum
    F.cosine_embedding_loss({r2}, {z}, torch.ones({r2}.shape[0])) | mul sum
    F.triplet_margin_loss({r2}, {z}, {z_b}) | sub sum
    F.margin_ranking_loss({f}, {z}, torch.ones_like({f})) | clamp_min
    F.hinge_embedding_loss({f}, torch.ones_like({f})) | where
    F.binary_cross_entropy(torch.sigmoid({f}), torch.sigmoid({z})) | binary_cross_entropy
    F.poisson_nll_loss({f}, {z}.abs()) | exp mul
    F.cross_entropy({r2}, F.softmax({z}, -1), label_smoothing={q} / 2) | _log_softmax
    F.cross_entropy({r2}, {classes}, ignore_index=0, label_smoothing={q} / 2) | _log_softmax
    F.multi_margin_loss({r2}, {classes}) | gather clamp_min
    F.alpha_dropout({f}, 0.0) * {q} | mul
""")
