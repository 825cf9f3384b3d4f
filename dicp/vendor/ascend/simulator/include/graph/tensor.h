#pragma once
#include <utility>
#include <vector>

#include "graph/types.h"

namespace ge {

class Shape {
 public:
  Shape() = default;
  explicit Shape(const std::vector<int64_t>& dims) : dims_(dims) {}
  std::vector<int64_t> GetDims() const { return dims_; }

 private:
  std::vector<int64_t> dims_;
};

class TensorDesc {
 public:
  TensorDesc() : TensorDesc(Shape()) {}
  explicit TensorDesc(Shape shape, Format format = FORMAT_ND, DataType dt = DT_FLOAT)
      : shape_(shape), origin_shape_(shape), format_(format), origin_format_(format), type_(dt) {}
  Shape GetShape() const { return shape_; }
  Shape GetOriginShape() const { return origin_shape_; }
  Format GetFormat() const { return format_; }
  Format GetOriginFormat() const { return origin_format_; }
  DataType GetDataType() const { return type_; }
  void SetOriginShape(const Shape& shape) { origin_shape_ = shape; }
  void SetOriginFormat(Format format) { origin_format_ = format; }

 private:
  Shape shape_, origin_shape_;
  Format format_, origin_format_;
  DataType type_;
};

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(const TensorDesc& desc) : desc_(desc) {}
  Tensor(const TensorDesc& desc, const std::vector<uint8_t>& data) : desc_(desc), data_(data) {}
  Tensor(const TensorDesc& desc, const uint8_t* data, size_t size)
      : desc_(desc), data_(data, data + size) {}
  Tensor(TensorDesc&& desc, std::vector<uint8_t>&& data)
      : desc_(std::move(desc)), data_(std::move(data)) {}
  TensorDesc GetTensorDesc() const { return desc_; }
  const std::vector<uint8_t>& bytes() const { return data_; }

 private:
  TensorDesc desc_;
  std::vector<uint8_t> data_;
};

}  // namespace ge
