"""Operators that stand for several: residual sums with their norms, gates, repeated elements."""

# ruff: noqa: E501

TABLES: dict[str, str] = {
    "nn_norm_ops.h": """
AddLayerNorm: x1:single x2:=x1 gamma:=x1 beta:=x1 bias?:=x1 -> y:=x1 mean:float rstd:float x:=x1 | epsilon:Float=1e-5f additional_output:Bool=false
""",
    "nn_activation.h": """
SwiGluGrad: y_grad:single x:=y_grad -> x_grad:=y_grad | dim:Int=-1
""",
    "selection_ops.h": """
RepeatInterleave: x:number repeats:index -> y:=x | axis:Int=1000
""",
}
