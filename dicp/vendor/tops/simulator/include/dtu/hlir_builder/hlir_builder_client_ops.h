// Operators of the HLIR builder that generated graphs use.
#pragma once
#include "dtu/hlir_builder/hlir_builder.h"

namespace builder {

using Lists = std::vector<Dims>;
using Names = std::vector<const char*>;

struct DimensionNumbers {
  Lists lists;
};

struct DotDimensionNumbers : DimensionNumbers {
  DotDimensionNumbers(const Dims& lhs_batch, const Dims& rhs_batch, const Dims& lhs_contracting,
                      const Dims& rhs_contracting)
      : DimensionNumbers{{lhs_batch, rhs_batch, lhs_contracting, rhs_contracting}} {}
};

struct GatherDimensionNumbers : DimensionNumbers {
  GatherDimensionNumbers(const Dims& offset_dims, const Dims& collapsed_slice_dims,
                         const Dims& start_index_map, int64_t index_vector_dim)
      : DimensionNumbers{{offset_dims, collapsed_slice_dims, start_index_map, {index_vector_dim}}} {}
};

struct ScatterDimensionNumbers : DimensionNumbers {
  ScatterDimensionNumbers(const Dims& window_dims, const Dims& inserted_dims,
                          const Dims& operand_dims, int64_t index_vector_dim)
      : DimensionNumbers{{window_dims, inserted_dims, operand_dims, {index_vector_dim}}} {}
};

struct ConvDimensionNumbers : DimensionNumbers {
  ConvDimensionNumbers(int64_t batch, int64_t feature, const Dims& spatial, int64_t filter_input,
                       int64_t filter_output, const Dims& filter_spatial, int64_t to_batch,
                       int64_t to_feature, const Dims& to_spatial)
      : DimensionNumbers{{{batch}, {feature}, spatial, {filter_input}, {filter_output},
                          filter_spatial, {to_batch}, {to_feature}, to_spatial}} {}
};

Op Const(std::shared_ptr<Builder> builder, void* data, const Type& type);
Op Iota(std::shared_ptr<Builder> builder, int64_t dimension, const Type& type);

// A row for each operator: its name, its parameters and their names. Declared here, defined by the
// library.
#define DICP_X(F, name) F(name, (Op x), x)
#define DICP_XY(F, name) F(name, (Op x, Op y), x, y)
#define DICP_AXES(F, name) F(name, (Op x, bool keepdim, const Dims& axes), x, keepdim, axes)
#define DICP_OPERATORS(F)                                                                        \
  DICP_X(F, Abs) DICP_X(F, Atan) DICP_X(F, Cos) DICP_X(F, Erf) DICP_X(F, Exp) DICP_X(F, Floor)    \
  DICP_X(F, HardSwish) DICP_X(F, Log) DICP_X(F, Neg) DICP_X(F, Not) DICP_X(F, Reciprocal)        \
  DICP_X(F, Relu) DICP_X(F, Rsqrt) DICP_X(F, Sigmoid) DICP_X(F, Sin) DICP_X(F, Sqrt)             \
  DICP_X(F, Square) DICP_X(F, Tanh)                                                              \
  DICP_XY(F, Add) DICP_XY(F, And) DICP_XY(F, Div) DICP_XY(F, Max) DICP_XY(F, Min)                \
  DICP_XY(F, Mul) DICP_XY(F, Or) DICP_XY(F, Pow) DICP_XY(F, Sub)                                 \
  DICP_AXES(F, ReduceMax) DICP_AXES(F, ReduceMean) DICP_AXES(F, ReduceMin)                       \
  DICP_AXES(F, ReduceProd) DICP_AXES(F, ReduceSum)                                               \
  F(GetTupleElement, (Op tuple, int64_t index), tuple, index)                                    \
  F(Compare, (Op x, Op y, const char* direction), x, y, direction)                               \
  F(Select, (Op condition, Op x, Op y), condition, x, y)                                         \
  F(Convert, (Op x, const Type& type), x, type)                                                  \
  F(Gelu, (Op x, bool approximate), x, approximate)                                              \
  F(GeluGrad, (Op dy, Op x, bool approximate), dy, x, approximate)                               \
  F(HardSwishGrad, (Op dy, Op x, float offset, float threshold, float scale), dy, x, offset,     \
    threshold, scale)                                                                            \
  F(Reshape, (Op x, const Type& type), x, type)                                                  \
  F(BroadcastInDim, (Op x, const Dims& dims, const Type& type), x, dims, type)                   \
  F(Transpose, (Op x, const Dims& perm), x, perm)                                                \
  F(Slice, (Op x, const Dims& start, const Dims& limit, const Dims& stride), x, start, limit,    \
    stride)                                                                                      \
  F(Reverse, (Op x, const Dims& dims, const Type& type), x, dims, type)                          \
  F(Concatenate, (const std::vector<Op>& xs, int64_t axis), xs, axis)                            \
  F(ArgMax, (Op x, int64_t axis, bool keepdim), x, axis, keepdim)                                \
  F(ArgMin, (Op x, int64_t axis, bool keepdim), x, axis, keepdim)                                \
  F(TopK, (Op x, int64_t k, int64_t axis, bool sorted, bool largest), x, k, axis, sorted,        \
    largest)                                                                                     \
  F(Softmax, (Op x, int64_t axis, bool accurate), x, axis, accurate)                             \
  F(DotGeneral, (Op lhs, Op rhs, const DotDimensionNumbers& dims), lhs, rhs, dims)               \
  F(Gather, (Op x, Op indices, const GatherDimensionNumbers& dims, const Dims& sizes,            \
             bool sorted, const Type& type), x, indices, dims, sizes, sorted, type)              \
  F(Scatter, (Op x, Op indices, Op updates, const ScatterDimensionNumbers& dims,                 \
              const Names& regions), x, indices, updates, dims, regions)                         \
  F(Conv2D, (const std::vector<Op>& xs, int64_t group, const char* auto_pad, const char* layout, \
             const Dims& stride, const Dims& pad, const Dims& dilation),                         \
    xs, group, auto_pad, layout, stride, pad, dilation)                                          \
  F(Conv, (Op x, Op filter, const ConvDimensionNumbers& dims, const Dims& strides,               \
           const Lists& pads, const Dims& lhs_dilation, const Dims& rhs_dilation,                \
           const Dims& reversal, const char* auto_pad, int64_t feature_groups,                   \
           int64_t batch_groups, const Names& precision),                                        \
    x, filter, dims, strides, pads, lhs_dilation, rhs_dilation, reversal, auto_pad,              \
    feature_groups, batch_groups, precision)                                                     \
  F(MaxPool2D, (Op x, const Dims& ksize, bool ceil_mode, bool indices, const char* auto_pad,     \
                const char* layout, const Dims& stride, const Dims& pad, const Dims& dilation),  \
    x, ksize, ceil_mode, indices, auto_pad, layout, stride, pad, dilation)
#define DICP_DECLARE(name, parameters, ...) Op name parameters;
DICP_OPERATORS(DICP_DECLARE)
#undef DICP_DECLARE

}  // namespace builder
