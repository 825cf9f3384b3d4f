"""HLIR's operators as dicp uses them: operands, results, attributes in the builder's order, dtypes.

The form of a row is described in `dicp.graphop.prototype`.
"""

from __future__ import annotations

import torch

from dicp.graphop.prototype import Prototype, parse_prototypes

DTYPES: dict[torch.dtype, str] = {
    torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int8: "S8",
    torch.int16: "S16", torch.int32: "S32", torch.int64: "S64", torch.uint8: "U8",
    torch.uint32: "U32", torch.bool: "PRED",
}  # fmt: skip
"""HLIR's name of each dtype, in the order of the simulator's numbers."""

_REAL = frozenset({torch.float16, torch.float32, torch.float64})
_INTEGER = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint32})
_INDEX = frozenset({torch.int32, torch.int64})

CLASSES: dict[str, frozenset[torch.dtype]] = {
    "real": _REAL,
    "number": _REAL | _INTEGER,
    "signed": _REAL | (_INTEGER - {torch.uint8, torch.uint32}),
    "single": _REAL - {torch.float64},
    "any": frozenset(DTYPES),
    "pred": frozenset({torch.bool}),
    "index": _INDEX,
    "int64": frozenset({torch.int64}),
}

TABLE = """
Abs: x:signed -> y:=x
Atan: x:real -> y:=x
Cos: x:real -> y:=x
Erf: x:real -> y:=x
Exp: x:real -> y:=x
Floor: x:real -> y:=x
HardSwish: x:single -> y:=x
Log: x:real -> y:=x
Neg: x:signed -> y:=x
Not: x:pred -> y:=x
Reciprocal: x:real -> y:=x
Relu: x:number -> y:=x
Rsqrt: x:real -> y:=x
Sigmoid: x:real -> y:=x
Sin: x:real -> y:=x
Sqrt: x:real -> y:=x
Square: x:number -> y:=x
Tanh: x:real -> y:=x
Add: x:number y:=x -> z:=x
And: x:pred y:=x -> z:=x
Div: x:number y:=x -> z:=x
Max: x:number y:=x -> z:=x
Min: x:number y:=x -> z:=x
Mul: x:number y:=x -> z:=x
Or: x:pred y:=x -> z:=x
Pow: x:number y:=x -> z:=x
Sub: x:number y:=x -> z:=x
Compare: x:any y:=x -> z:pred | direction:String
Select: condition:pred x:any y:=x -> z:=x
Convert: x:any -> y:any | type:Result
Gelu: x:single -> y:=x | approximate:Bool
GeluGrad: dy:single x:=dy -> dx:=dy | approximate:Bool
HardSwishGrad: dy:single x:=dy -> dx:=dy | offset:Float threshold:Float scale:Float
Reshape: x:any -> y:=x | type:Result
BroadcastInDim: x:any -> y:=x | dims:ListInt type:Result
Transpose: x:any -> y:=x | perm:ListInt
Slice: x:any -> y:=x | start:ListInt limit:ListInt stride:ListInt
Reverse: x:any -> y:=x | dims:ListInt type:Result
Concatenate: xs*:any -> y:=xs | axis:Int
Iota: -> y:any | dimension:Int type:Result
ReduceMax: x:number -> y:=x | keepdim:Bool axes:ListInt
ReduceMean: x:real -> y:=x | keepdim:Bool axes:ListInt
ReduceMin: x:number -> y:=x | keepdim:Bool axes:ListInt
ReduceProd: x:number -> y:=x | keepdim:Bool axes:ListInt
ReduceSum: x:number -> y:=x | keepdim:Bool axes:ListInt
ArgMax: x:number -> y:int64 | axis:Int keepdim:Bool
ArgMin: x:number -> y:int64 | axis:Int keepdim:Bool
TopK: x:number -> values:=x indices:int64 | k:Int axis:Int sorted:Bool largest:Bool
Softmax: x:real -> y:=x | axis:Int accurate:Bool
DotGeneral: lhs:real rhs:=lhs -> y:=lhs | dims:Lists
Gather: x:any indices:index -> y:=x | dims:Lists sizes:ListInt sorted:Bool type:Result
Scatter: x:any indices:index updates:=x -> y:=x | dims:Lists regions:ListString
Conv2D: xs*:real -> y:=xs | group:Int auto_pad:String layout:String stride:ListInt pad:ListInt dilation:ListInt
Conv: x:real filter:=x -> y:=x | dims:Lists strides:ListInt pads:Lists lhs_dilation:ListInt rhs_dilation:ListInt reversal:ListInt auto_pad:String feature_groups:Int batch_groups:Int precision:ListString
MaxPool2D: x:number -> y:=x | ksize:ListInt ceil_mode:Bool indices:Bool auto_pad:String layout:String stride:ListInt pad:ListInt dilation:ListInt
"""  # noqa: E501

PROTOTYPES: dict[str, Prototype] = parse_prototypes("hlir_builder_client_ops.h", TABLE, CLASSES)

OP_TYPES = {
    "DotGeneral": "DotInference", "Gather": "GatherInference", "Conv2D": "Conv2DInference",
}  # fmt: skip
"""The attribute `op_type`, which chooses the implementation."""

ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "Atan", "Compare", "Convert", "Cos", "Div", "Erf", "Exp", "Floor", "Gelu",
    "GeluGrad", "HardSwish", "HardSwishGrad", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow",
    "Reciprocal", "Relu", "Rsqrt", "Select", "Sigmoid", "Sin", "Sqrt", "Square", "Sub", "Tanh",
})  # fmt: skip
"""Operators on tensors of equal sizes, element by element."""
