#pragma once
#include <vector>

#include "graph/types.h"

namespace ge {

class Shape {
 public:
  explicit Shape(const std::vector<int64_t>& dims) : dims_(dims) {}
  std::vector<int64_t> GetDims() const { return dims_; }

 private:
  std::vector<int64_t> dims_;
};

class TensorDesc {
 public:
  explicit TensorDesc(Shape shape, Format format = FORMAT_ND, DataType dt = DT_FLOAT)
      : shape_(shape), format_(format), type_(dt) {}
  Shape GetShape() const { return shape_; }
  Format GetFormat() const { return format_; }
  DataType GetDataType() const { return type_; }

 private:
  Shape shape_;
  Format format_;
  DataType type_;
};

class Tensor {
 public:
  Tensor(const TensorDesc& desc, const uint8_t* data, size_t size)
      : desc_(desc), data_(data, data + size) {}
  TensorDesc GetTensorDesc() const { return desc_; }
  const std::vector<uint8_t>& bytes() const { return data_; }

 private:
  TensorDesc desc_;
  std::vector<uint8_t> data_;
};

}  // namespace ge
