"""The vocabulary of abstract graph operators that rules are written with.

A row has an operator's operands in order (`name?` is optional, `name*` is any number of tensors),
its results and its attributes. Operands that determine sizes (axes, shapes, begin and end) are
vectors of integers whose contents are known, or symbolic, while a graph is built. A vendor has an
operator of the same form, perhaps under another name (`Ops.names`), or composes it from its own
(`Ops.forms`); calls of operators that it lacks run eagerly.
"""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Mapping

from dicp.graphop.prototype import Prototype, parse_prototypes

TABLE = """
Abs: x -> y
Acos: x -> y
Acosh: x -> y
AdaptiveAvgPool2D: x -> y | output_size:ListInt
AdaptiveAvgPool2DGrad: input_grad -> output_grad | orig_input_shape:ListInt
AdaptiveMaxPool2D: x -> y argmax | output_size:ListInt
Add: x1 x2 -> y
Addcdiv: input_data x1 x2 value -> y
Addcmul: input_data x1 x2 value -> y
ArgMax: x dimension -> y | dtype:Type
ArgMin: x dimension -> y | dtype:Type
AsStrided: x size stride storage_offset -> y
Asin: x -> y
Asinh: x -> y
Atan: x -> y
Atan2: x1 x2 -> y
Atanh: x -> y
AvgPool2D: x -> y | ksize:ListInt strides:ListInt padding_mode:String pads:ListInt data_format:String ceil_mode:Bool exclusive:Bool divisor_override:Int
AvgPool2DGrad: orig_input_shape input_grad -> out_grad | ksize:ListInt strides:ListInt padding_mode:String pads:ListInt data_format:String ceil_mode:Bool exclusive:Bool
Axpy: x1 x2 alpha -> y
BatchMatMul: x1 x2 bias? -> y | adj_x1:Bool adj_x2:Bool
BatchNormGrad: dy x weight running_mean running_var save_mean save_rstd -> dx dweight dbias | is_training:Bool epsilon:Float
BatchNormInference: x scale offset mean variance -> y | epsilon:Float
BatchNormTraining: x weight bias running_mean running_var -> y running_mean running_var save_mean save_rstd | epsilon:Float momentum:Float is_training:Bool
BesselI0e: x -> y
Bitcast: x -> y | type:Type
BitwiseAnd: x1 x2 -> y
BitwiseOr: x1 x2 -> y
BitwiseXor: x1 x2 -> y
BroadcastTo: x shape -> y
Cast: x -> y | dst_type:Int
Ceil: x -> y
Concat: x* -> y | concat_dim:Int N:Int
Conv2D: x filter bias? -> y | strides:ListInt pads:ListInt dilations:ListInt groups:Int data_format:String
Conv2DBackpropFilter: x filter_size out_backprop -> y | strides:ListInt pads:ListInt dilations:ListInt groups:Int data_format:String
Conv2DBackpropInput: input_size filter out_backprop -> y | strides:ListInt pads:ListInt dilations:ListInt groups:Int data_format:String
Conv2DTranspose: input_size x filter bias? -> y | strides:ListInt pads:ListInt dilations:ListInt groups:Int data_format:String output_padding:ListInt
Conv3D: x filter bias? -> y | strides:ListInt pads:ListInt dilations:ListInt groups:Int data_format:String
Conv3DBackpropFilter: x filter_size out_backprop -> y | strides:ListInt pads:ListInt dilations:ListInt groups:Int data_format:String
Conv3DBackpropInput: input_size filter out_backprop -> y | strides:ListInt pads:ListInt dilations:ListInt groups:Int data_format:String
Conv3DTranspose: input_size x filter bias? -> y | strides:ListInt pads:ListInt dilations:ListInt groups:Int data_format:String output_padding:ListInt
Copy: x -> y
Cos: x -> y
Cosh: x -> y
Cummax: x -> y indices | dim:Int
Cummin: x -> y indices | axis:Int
Cumprod: x axis -> y
Cumsum: x axis -> y
CumulativeLogsumexp: x axis -> y
Digamma: x -> y
Div: x1 x2 -> y
Equal: x1 x2 -> y
Erf: x -> y
Erfc: x -> y
Erfinv: input_x -> output_y
Exp: x -> y | base:Float scale:Float
Expm1: x -> y
Fill: dims value -> y
Floor: x -> y
FloorDiv: x1 x2 -> y
FloorMod: x1 x2 -> y
Gather: x indices axis -> y | batch_dims:Int
GatherElements: x index -> y | dim:Int
GatherND: x indices -> y
Gelu: x -> y | approximate:String
GeluGrad: dy x -> z | approximate:String
Greater: x1 x2 -> y
GreaterEqual: x1 x2 -> y
GridSampler2D: x grid -> y | interpolation_mode:String padding_mode:String align_corners:Bool
GridSampler2DGrad: grad x grid -> dx dgrid | interpolation_mode:String padding_mode:String align_corners:Bool
HardSwish: x -> y
HardSwishGrad: grad x -> y
Histogram: x -> y | bins:Int min:Float max:Float
Identity: x -> y
Igamma: a x -> z
Igammac: a x -> z
Invert: x -> y
IsInf: x -> y
IsNan: x -> y
LayerNorm: x normalized_shape gamma? beta? -> y mean rstd | epsilon:Float
LeakyRelu: x -> y | negative_slope:Float
LeftShift: x y -> z
Lerp: start end weight -> y
Less: x1 x2 -> y
LessEqual: x1 x2 -> y
Lgamma: x -> y
Log: x -> y | base:Float scale:Float
Log1p: x -> y
LogSoftmax: logits -> logsoftmax | axes:ListInt
LogSoftmaxGrad: grad x -> y | axis:ListInt
LogicalAnd: x1 x2 -> y
LogicalNot: x -> y
LogicalOr: x1 x2 -> y
MaskedScatter: x mask updates -> y
MatMul: x1 x2 bias? -> y | transpose_x1:Bool transpose_x2:Bool
MaxPool2D: x -> y | ksize:ListInt strides:ListInt padding_mode:String pads:ListInt data_format:String ceil_mode:Bool
Maximum: x1 x2 -> y
Minimum: x1 x2 -> y
Mish: x -> y
Mod: x1 x2 -> y
Mul: x1 x2 -> y
Ndtri: x -> y
Neg: x -> y
NextAfter: x1 x2 -> output
NotEqual: x1 x2 -> y
Pad: x paddings constant_values? -> y | mode:String
Pdist: x -> y | p:Float
Pow: x1 x2 -> y
RandomNormal: shape key counter alg -> y | dtype:Type
RandomUniform: shape key counter alg -> y | dtype:Type
Range: start limit delta -> y
Reciprocal: x -> y
ReduceAll: x axes -> y | keep_dims:Bool
ReduceAny: x axes -> y | keep_dims:Bool
ReduceMax: x axes -> y | keep_dims:Bool
ReduceMean: x axes -> y | keep_dims:Bool
ReduceMin: x axes -> y | keep_dims:Bool
ReduceProd: x axes -> y | keep_dims:Bool
ReduceSum: x axes -> y | keep_dims:Bool
Relu: x -> y
Reshape: x shape -> y
Reverse: x axis -> y
RightShift: x y -> z
RmsNorm: x gamma -> y rstd | epsilon:Float
Roll: x -> y | shifts:ListInt dims:ListInt
Round: x -> y
Rsqrt: x -> y
ScatterElements: data indices updates -> y | axis:Int reduction:String
ScatterNDAdd: x indices updates -> y
ScatterNDUpdate: x indices updates -> y
SearchSorted: sorted_sequence values sorter? -> out | dtype:Type right:Bool
Select: condition then else -> result
Sigmoid: x -> y
SigmoidGrad: y dy -> z
Sign: x -> y
Sin: x -> y
Sinh: x -> y
Softmax: x -> y | axes:ListInt
SoftmaxGrad: softmax grad_softmax -> grad_x | axes:ListInt
Softplus: x -> y | beta:Float threshold:Float
Sort: x -> y1 y2 | axis:Int descending:Bool stable:Bool
Split: x -> y* | size_splits:ListInt split_dim:Int num_split:Int
Sqrt: x -> y
Square: x -> y
Stack: x* -> y | axis:Int N:Int
StridedSlice: x begin end strides -> y
Sub: x1 x2 -> y
Swish: x -> y | scale:Float
SwishGrad: grad x y -> grad_x | scale:Float
Tan: x -> y
Tanh: x -> y
TanhGrad: y dy -> z
Tile: x multiples -> y
TopK: x k -> values indices | sorted:Bool dim:Int largest:Bool
Transpose: x perm -> y
Tril: x -> y | diagonal:Int
Triu: x -> y | diagonal:Int
Trunc: input_x -> output_y
TruncateDiv: x1 x2 -> y
Unstack: x -> y* | num:Int axis:Int
"""

VOCABULARY: Mapping[str, Prototype] = parse_prototypes("vocabulary", TABLE, {"any": frozenset()})
"""The prototypes by name; dtypes are checked by the vendor's own prototypes."""
