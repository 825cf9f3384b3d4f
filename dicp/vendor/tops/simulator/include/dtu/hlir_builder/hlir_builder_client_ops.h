// Operators of the HLIR builder that generated graphs use.
#pragma once
#include "dtu/hlir_builder/hlir_builder.h"

namespace builder {

using Lists = std::vector<Dims>;
using Names = std::vector<const char*>;

struct DotDimensionNumbers {
  DotDimensionNumbers(const Dims& lhs_batch, const Dims& rhs_batch, const Dims& lhs_contracting,
                      const Dims& rhs_contracting);
  Lists lists;
};

struct GatherDimensionNumbers {
  GatherDimensionNumbers(const Dims& offset_dims, const Dims& collapsed_slice_dims,
                         const Dims& start_index_map, int64_t index_vector_dim);
  Lists lists;
};

struct ScatterDimensionNumbers {
  ScatterDimensionNumbers(const Dims& update_window_dims, const Dims& inserted_window_dims,
                          const Dims& scatter_dims_to_operand_dims, int64_t index_vector_dim);
  Lists lists;
};

struct ConvDimensionNumbers {
  ConvDimensionNumbers(int64_t input_batch, int64_t input_feature, const Dims& input_spatial,
                       int64_t kernel_input_feature, int64_t kernel_output_feature,
                       const Dims& kernel_spatial, int64_t output_batch, int64_t output_feature,
                       const Dims& output_spatial);
  Lists lists;
};

Op Const(std::shared_ptr<Builder> builder, void* data, const Type& type);
Op Iota(std::shared_ptr<Builder> builder, int64_t dimension, const Type& type);
Op GetTupleElement(Op tuple, int64_t index);

#define DICP_UNARY(F)                                                                         \
  F(Abs) F(Atan) F(Cos) F(Erf) F(Exp) F(Floor) F(HardSwish) F(Log) F(Neg) F(Not) F(Reciprocal) \
  F(Relu) F(Rsqrt) F(Sigmoid) F(Sin) F(Sqrt) F(Square) F(Tanh)
#define DICP_BINARY(F) F(Add) F(And) F(Div) F(Max) F(Min) F(Mul) F(Or) F(Pow) F(Sub)
#define DICP_REDUCTION(F) F(ReduceMax) F(ReduceMean) F(ReduceMin) F(ReduceProd) F(ReduceSum)
#define DICP_DECLARE(name) Op name(Op x);
DICP_UNARY(DICP_DECLARE)
#undef DICP_DECLARE
#define DICP_DECLARE(name) Op name(Op x, Op y);
DICP_BINARY(DICP_DECLARE)
#undef DICP_DECLARE
#define DICP_DECLARE(name) Op name(Op x, bool keepdim, const Dims& axes);
DICP_REDUCTION(DICP_DECLARE)
#undef DICP_DECLARE

Op Compare(Op x, Op y, const char* direction);
Op Select(Op condition, Op x, Op y);
Op Convert(Op x, const Type& type);
Op Gelu(Op x, bool approximate);
Op GeluGrad(Op dy, Op x, bool approximate);
Op HardSwishGrad(Op dy, Op x, float offset, float threshold, float scale);

Op Reshape(Op x, const Type& type);
Op BroadcastInDim(Op x, const Dims& dims, const Type& type);
Op Transpose(Op x, const Dims& perm);
Op Slice(Op x, const Dims& start, const Dims& limit, const Dims& stride);
Op Reverse(Op x, const Dims& dims, const Type& type);
Op Concatenate(const std::vector<Op>& xs, int64_t axis);

Op ArgMax(Op x, int64_t axis, bool keepdim);
Op ArgMin(Op x, int64_t axis, bool keepdim);
Op TopK(Op x, int64_t k, int64_t axis, bool sorted, bool largest);
Op Softmax(Op x, int64_t axis, bool accurate);
Op DotGeneral(Op lhs, Op rhs, const DotDimensionNumbers& dims);
Op Gather(Op x, Op indices, const GatherDimensionNumbers& dims, const Dims& sizes, bool sorted,
          const Type& type);
Op Scatter(Op x, Op indices, Op updates, const ScatterDimensionNumbers& dims,
           const Names& regions);

Op Conv2D(const std::vector<Op>& xs, int64_t group, const char* auto_pad, const char* layout,
          const Dims& stride, const Dims& pad, const Dims& dilation);
Op Conv(Op x, Op filter, const ConvDimensionNumbers& dims, const Dims& strides, const Lists& pads,
        const Dims& lhs_dilation, const Dims& rhs_dilation, const Dims& reversal,
        const char* auto_pad, int64_t feature_groups, int64_t batch_groups,
        const Names& precision);
Op MaxPool2D(Op x, const Dims& ksize, bool ceil_mode, bool indices, const char* auto_pad,
             const char* layout, const Dims& stride, const Dims& pad, const Dims& dilation);
Op SelectAndScatter(Op x, Op source, Op initial, const Names& regions, const Dims& window,
                    const Dims& strides, const Lists& pads, const Type& type);

}  // namespace builder
