"""The operators in use, by the header that declares them: names, ports, attributes, dtypes.

The form of a row is described in `dicp.graphop.prototype`; dtype classes stand in the package.
"""

# ruff: noqa: E501

TABLES: dict[str, str] = {
    "elewise_calculation_ops.h": """
Abs: x:number-u8 -> y:=x
Acos: x:real -> y:=x
Acosh: x:real -> y:=x
Add: x1:number x2:=x1 -> y:=x1
Addcdiv: input_data:real x1:=input_data x2:=input_data value:=input_data -> y:=input_data
Addcmul: input_data:number-i16 x1:=input_data x2:=input_data value:=input_data -> y:=input_data
ArgMaxV2: x:number dimension:index -> y:index | dtype:Type=DT_INT64
ArgMin: x:number dimension:index -> y:index | dtype:Type=DT_INT64
Asin: x:real -> y:=x
Asinh: x:real -> y:=x
Atan2: x1:real x2:=x1 -> y:=x1
Atan: x:real -> y:=x
Atanh: x:real -> y:=x
AxpyV2: x1:number x2:=x1 alpha:=x1 -> y:=x1
BesselI0e: x:real -> y:=x
BitwiseAnd: x1:integer x2:=x1 -> y:=x1
BitwiseOr: x1:integer x2:=x1 -> y:=x1
BitwiseXor: x1:integer x2:=x1 -> y:=x1
Cast: x:any -> y:any | dst_type:Int
Ceil: x:real -> y:=x
Cos: x:real -> y:=x
Cosh: x:real -> y:=x
Equal: x1:number+bool x2:=x1 -> y:bool
Erfinv: input_x:single -> output_y:=input_x
Exp: x:real -> y:=x | base:Float=-1.0 scale:Float=1.0 shift:Float=0.0
Expm1: x:real -> y:=x
Floor: x:real -> y:=x
FloorDiv: x1:number x2:=x1 -> y:=x1
FloorMod: x1:number-i16-i8-u8 x2:=x1 -> y:=x1
Greater: x1:number x2:=x1 -> y:bool
GreaterEqual: x1:number x2:=x1 -> y:bool
Invert: x:integer -> y:=x
Lerp: start:single end:=start weight:=start -> y:=start
Less: x1:number x2:=x1 -> y:bool
LessEqual: x1:number x2:=x1 -> y:bool
Log1p: x:real -> y:=x
Log: x:real -> y:=x | base:Float=-1.0 scale:Float=1.0 shift:Float=0.0
LogicalAnd: x1:bool x2:=x1 -> y:=x1
LogicalNot: x:bool -> y:=x
LogicalOr: x1:bool x2:=x1 -> y:=x1
Maximum: x1:number-i16-i8-u8 x2:=x1 -> y:=x1
Minimum: x1:number-i16-i8-u8 x2:=x1 -> y:=x1
Mod: x1:number-i16 x2:=x1 -> y:=x1
Mul: x1:number x2:=x1 -> y:=x1
Ndtri: x:real -> y:=x
Neg: x:number-i16-u8 -> y:=x
NotEqual: x1:number x2:=x1 -> y:bool
Pow: x1:number x2:=x1 -> y:=x1
RealDiv: x1:number x2:=x1 -> y:=x1
Reciprocal: x:real -> y:=x
Rint: x:real -> y:=x
Rsqrt: x:real -> y:=x
Sign: x:number-i16-i8-u8 -> y:=x
Sin: x:real -> y:=x
Sinh: x:real -> y:=x
Sqrt: x:real -> y:=x
Square: x:number-i16-i8-u8 -> y:=x
Sub: x1:number x2:=x1 -> y:=x1
Tan: x:real -> y:=x
TensorMove: x:any -> y:=x
TruncateDiv: x1:number x2:=x1 -> y:=x1
""",
    "nonlinear_fuc_ops.h": """
GeluGradV2: dy:single x:=dy -> z:=dy | approximate:String=none
GeluV2: x:single -> y:=x | approximate:String=none
HardSwish: x:single -> y:=x
HardSwishGrad: grad:single x:=grad -> y:=grad
LeakyRelu: x:real -> y:=x | negative_slope:Float=0.0
Mish: x:single -> y:=x
Relu: x:number -> y:=x
Sigmoid: x:real -> y:=x
SigmoidGrad: y:real dy:=y -> z:=y | complex_conj:Bool=false
SoftplusV2: x:single -> y:=x | beta:Float=1.0 threshold:Float=20.0
Swish: x:single -> y:=x | scale:Float=1.0
SwishGrad: grad:single x:=grad y:=grad -> grad_x:=grad | scale:Float=1.0
Tanh: x:real -> y:=x
TanhGrad: y:real dy:=y -> z:=y | complex_conj:Bool=false
""",
    "math_ops.h": """
Digamma: x:real-bf16 -> y:=x
Erf: x:real -> y:=x
Erfc: x:real -> y:=x
Histogram: x:float -> y:=x | bins:Int=100 min:Float=0.0 max:Float=0.0
Igamma: a:f32f64 x:=a -> z:=a
Igammac: a:f32f64 x:=a -> z:=a
IsInf: x:real -> y:bool
IsNan: x:real -> y:bool
Lgamma: x:real-bf16 -> y:=x
NextAfter: x1:f32f64 x2:=x1 -> output:=x1
Pdist: x:single-bf16 -> y:=x | p:Float=2.0
Trunc: input_x:number-f64-i16-i64 -> output_y:=input_x
""",
    "bitwise_ops.h": """
LeftShift: x:integer y:=x -> z:=x
RightShift: x:integer y:=x -> z:=x
""",
    "selection_ops.h": """
Cummax: x:number -> y:=x indices:int32 | dim:Int
Cummin: x:number -> y:=x indices:int32 | axis:Int
Cumprod: x:number axis:index -> y:=x | exclusive:Bool=false reverse:Bool=false
Cumsum: x:number axis:index -> y:=x | exclusive:Bool=false reverse:Bool=false
CumulativeLogsumexp: x:real-bf16 axis:int32 -> y:=x | exclusive:Bool=false reverse:Bool=false
GatherElements: x:any-f64 index:index -> y:=x | dim:Int=0
GatherNd: x:any indices:index -> y:=x | negative_index_support:Bool=false
GatherV2: x:any indices:index axis:index -> y:=x | batch_dims:Int=0 is_preprocessed:Bool=false negative_index_support:Bool=false
MaskedScatter: x:number+bool mask:bool updates:=x -> y:=x
Range: start:number-i16-i8-u8 limit:=start delta:=start -> y:=start
ReverseV2: x:any-u32-u64 axis:index -> y:=x
SearchSorted: sorted_sequence:number-bf16-f64 values:=sorted_sequence sorter?:int64 -> out:index | dtype:Type=DT_INT64 right:Bool=false
SelectV2: condition:bool then:any-bool else:=then -> result:=then
StridedSlice: x:any-bool begin:index end:index strides:index -> y:=x | begin_mask:Int=0 end_mask:Int=0 ellipsis_mask:Int=0 new_axis_mask:Int=0 shrink_axis_mask:Int=0
Tile: x:any multiples:index -> y:=x
TopKV2: x:number k:int32 -> values:=x indices:int32 | sorted:Bool=true dim:Int=-1 largest:Bool=true
""",
    "array_ops.h": """
Identity: x:any -> y:=x
Reshape: x:any shape:index -> y:=x | axis:Int=0 num_axes:Int=-1
""",
    "reduce_ops.h": """
BNInfer: x:single scale:float offset:float mean:float variance:float -> y:=x | epsilon:Float
ReduceAll: x:bool axes:index -> y:=x | keep_dims:Bool=false
ReduceAny: x:bool axes:index -> y:=x | keep_dims:Bool=false
ReduceMax: x:number axes:index -> y:=x | keep_dims:Bool=false
ReduceMean: x:number axes:index -> y:=x | keep_dims:Bool=false noop_with_empty_axes:Bool=true
ReduceMin: x:number axes:index -> y:=x | keep_dims:Bool=false
ReduceProd: x:number axes:index -> y:=x | keep_dims:Bool=false
ReduceSum: x:number axes:index -> y:=x | keep_dims:Bool=false
""",
    "nn_detect_ops.h": """
Sort: x:number-f64 -> y1:=x y2:int32 | axis:Int=-1 descending:Bool=false stable:Bool=false
""",
    "transformation_ops.h": """
AsStrided: x:any-bool size:index stride:index storage_offset:index -> y:=x
Bitcast: x:any-bf16 -> y:any-bf16 | type:Type
TransData: src:any-bool -> dst:=src | src_format:String dst_format:String src_subformat:Int=0 dst_subformat:Int=0 groups:Int=1
Transpose: x:any-bool perm:index -> y:=x
Unpack: x:any-bool -> y*:=x | num:Int axis:Int=0
""",
    "pad_ops.h": """
BroadcastTo: x:any shape:index -> y:=x
Fill: dims:index value:any -> y:=value
PadV3: x:any-bool paddings:index constant_values?:=x -> y:=x | mode:String=constant paddings_contiguous:Bool=true
""",
    "split_combination_ops.h": """
ConcatD: x*:any-bool-f64 -> y:=x | concat_dim:Int N:Int=1
Pack: x*:any -> y:=x | axis:Int=0 N:Int
SplitVD: x:any-f64 -> y*:=x | size_splits:ListInt split_dim:Int num_split:Int
""",
    "matrix_calculation_ops.h": """
BatchMatMulV2: x1:single+int32 x2:=x1 bias?:=x1 offset_w?:i8 -> y:=x1 | adj_x1:Bool=false adj_x2:Bool=false offset_x:Int=0
MatMulV2: x1:single+int32 x2:=x1 bias?:=x1 offset_w?:i8 -> y:=x1 | transpose_x1:Bool=false transpose_x2:Bool=false offset_x:Int=0
ScatterElements: data:any-bool indices:index updates:=data -> y:=data | axis:Int=0 reduction:String=none
TensorScatterUpdate: x:any indices:index updates:=x -> y:=x
Tril: x:any-bool -> y:=x | diagonal:Int=0
Triu: x:any-bool -> y:=x | diagonal:Int=0
""",
    "nn_batch_norm_ops.h": """
BatchNormGradV3: dy:single x:=dy weight:float running_mean:float running_var:float save_mean:float save_rstd:float -> dx:=dy dweight:float dbias:float | is_training:Bool=true epsilon:Float=1e-5
""",
    "nn_norm_ops.h": """
BatchNormV3: x:single weight:float bias:float running_mean:float running_var:float -> y:=x running_mean:float running_var:float save_mean:float save_rstd:float | epsilon:Float=1e-5f momentum:Float=0.1f is_training:Bool=true
LayerNormV4: x:single normalized_shape:int32 gamma?:=x beta?:=x -> y:=x mean:float rstd:float | epsilon:Float=0.00001f
LogSoftmaxGrad: grad:single x:=grad -> y:=grad | axis:ListInt=-1
LogSoftmaxV2: logits:real -> logsoftmax:=logits | axes:ListInt=-1
RmsNorm: x:single gamma:=x -> y:=x rstd:float | epsilon:Float=1e-6f
Roll: x:bf16,f16,f32,i32,i64,i8,u32,u8 -> y:=x | shifts:ListInt dims:ListInt=
SoftmaxGrad: softmax:single grad_softmax:=softmax -> grad_x:=softmax | axes:ListInt=-1
SoftmaxV2: x:real -> y:=x | axes:ListInt=-1 half_to_float:Bool=false
""",
    "nn_calculation_ops.h": """
Conv2D: x:single filter:=x bias?:f16,f32 offset_w?:i8 -> y:=x | strides:ListInt pads:ListInt dilations:ListInt=1,1,1,1 groups:Int=1 data_format:String=NHWC offset_x:Int=0
Conv2DBackpropFilter: x:single filter_size:int32 out_backprop:=x -> y:float | strides:ListInt pads:ListInt dilations:ListInt=1,1,1,1 groups:Int=1 data_format:String=NHWC
Conv2DBackpropInput: input_size:int32 filter:single out_backprop:=filter -> y:=filter | strides:ListInt pads:ListInt dilations:ListInt=1,1,1,1 groups:Int=1 data_format:String=NHWC
Conv2DTranspose: input_size:index x:half filter:=x bias?:f16,f32 offset_w?:i8 -> y:=x | strides:ListInt pads:ListInt dilations:ListInt=1,1,1,1 groups:Int=1 data_format:String=NHWC output_padding:ListInt=0,0,0,0 offset_x:Int=0
Conv3D: x:half filter:=x bias?:f16,f32 offset_w?:i8 -> y:=x | strides:ListInt pads:ListInt dilations:ListInt=1,1,1,1,1 groups:Int=1 data_format:String=NDHWC offset_x:Int=0
Conv3DBackpropFilter: x:single filter_size:int32 out_backprop:=x -> y:float | strides:ListInt pads:ListInt dilations:ListInt=1,1,1,1,1 groups:Int=1 data_format:String=NDHWC
Conv3DBackpropInput: input_size:index filter:single out_backprop:=filter -> y:=filter | strides:ListInt pads:ListInt dilations:ListInt=1,1,1,1,1 groups:Int=1 data_format:String=NDHWC
Conv3DTranspose: input_size:index x:half filter:=x bias?:f16,f32 offset_w?:i8 -> y:=x | strides:ListInt pads:ListInt dilations:ListInt=1,1,1,1,1 groups:Int=1 data_format:String=NDHWC output_padding:ListInt=0,0,0,0,0 offset_x:Int=0
""",
    "nn_pooling_ops.h": """
AdaptiveAvgPool2d: x:single-bf16 -> y:=x | output_size:ListInt
AdaptiveMaxPool2d: x:f16,f64 -> y:=x argmax:int32 | output_size:ListInt
AdaptiveAvgPool2dGrad: input_grad:single-bf16 -> output_grad:=input_grad | orig_input_shape:ListInt
AvgPoolV2: x:real-bf16 -> y:=x | ksize:ListInt strides:ListInt padding_mode:String=CALCULATED pads:ListInt=0,0,0,0 data_format:String=NCHW global_pooling:Bool=false ceil_mode:Bool=false exclusive:Bool=true divisor_override:Int=0
AvgPoolV2Grad: orig_input_shape:int32 input_grad:f16 -> out_grad:=input_grad | ksize:ListInt strides:ListInt padding_mode:String=CALCULATED pads:ListInt=0,0,0,0 data_format:String=NCHW global_pooling:Bool=false ceil_mode:Bool=false exclusive:Bool=true
MaxPoolV3: x:f16,f64 -> y:=x | ksize:ListInt strides:ListInt padding_mode:String=CALCULATED pads:ListInt=0,0,0,0 data_format:String=NCHW global_pooling:Bool=false ceil_mode:Bool=false
""",
    "image_ops.h": """
GridSampler2D: x:single-bf16 grid:=x -> y:=x | interpolation_mode:String=bilinear padding_mode:String=zeros align_corners:Bool=false
GridSampler2DGrad: grad:single x:=grad grid:=grad -> dx:=grad dgrid:=grad | interpolation_mode:String=bilinear padding_mode:String=zeros align_corners:Bool=false
""",
    "nn_activation.h": """
SwiGlu: x:single -> y:=x | dim:Int=-1
""",
    "nn_other.h": """
RotaryMul: x:single-bf16 r1:=x r2:=x -> y:=x
""",
    "nn_norm.h": """
AddRmsNorm: x1:single x2:=x1 gamma:=x1 -> y:=x1 rstd:float x:=x1 | epsilon:Float=1e-6f
""",
    "stateless_random_ops.h": """
StatelessRandomNormalV2: shape:index key:uint64 counter:uint64 alg:int32 -> y:real | dtype:Type=DT_FLOAT
StatelessRandomUniformV2: shape:index key:uint64 counter:uint64 alg:int32 -> y:real | dtype:Type=DT_FLOAT
""",
}
