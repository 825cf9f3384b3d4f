#pragma once
#include "graph/tensor.h"

namespace ge {

struct Record;  // what the simulator remembers of one operator; shared by all copies

class Operator {
 public:
  Operator(const char* name, const char* type);
  Operator(const Operator& other);
  Operator& operator=(const Operator& other);
  ~Operator();

  Operator& SetInput(const char* port, const Operator& source);
  Operator& SetInput(const char* port, const Operator& source, const char* output);
  Operator& SetInput(const char* port, uint32_t index, const Operator& source);
  Operator& SetInput(const char* port, uint32_t index, const Operator& source, const char* output);
  Operator& AddControlInput(const Operator& source);
  void DynamicInputRegister(const char* port, uint32_t count);
  void DynamicOutputRegister(const char* port, uint32_t count);
  Operator& SetAttr(const char* name, bool value);
  Operator& SetAttr(const char* name, int64_t value);
  Operator& SetAttr(const char* name, float value);
  Operator& SetAttr(const char* name, const char* value);
  Operator& SetAttr(const char* name, DataType value);
  Operator& SetAttr(const char* name, const Tensor& value);
  Operator& SetAttr(const char* name, const std::vector<int64_t>& value);
  Operator& SetAttr(const char* name, const std::vector<float>& value);
  graphStatus UpdateInputDesc(const char* port, const TensorDesc& desc);
  graphStatus UpdateOutputDesc(const char* port, const TensorDesc& desc);

  Record* record() const { return record_; }

 private:
  Record* record_;
};

}  // namespace ge
