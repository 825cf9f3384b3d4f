#pragma once
#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

#include "graph/ascend_string.h"
#include "graph/tensor.h"

namespace ge {

struct Record;  // what the simulator remembers of one operator; shared by all copies

// What arguments of overloads are made from implicitly; a shared pointer stands behind the first.
class OutHandler {
 public:
  OutHandler();
  OutHandler(std::nullptr_t);
};
class AttrValue {
 public:
  AttrValue();
};
class NamedAttrs {
 public:
  NamedAttrs();
};

// Every overload takes a name as std::string, too, which is deprecated and has no definition here.
class Operator {
 public:
  Operator();
  explicit Operator(const std::string& type);
  explicit Operator(const char* type);
  Operator(const std::string& name, const std::string& type);
  Operator(const AscendString& name, const AscendString& type);
  Operator(const char* name, const char* type);
  Operator(const Operator& other);
  Operator& operator=(const Operator& other);
  virtual ~Operator();

  Operator& SetInput(const std::string& port, const Operator& source);
  Operator& SetInput(const char* port, const Operator& source);
  Operator& SetInput(const std::string& port, const Operator& source, const std::string& output);
  Operator& SetInput(const char* port, const Operator& source, const char* output);
  Operator& SetInput(const std::string& port, const Operator& source, uint32_t output);
  Operator& SetInput(const char* port, const Operator& source, uint32_t output);
  Operator& SetInput(uint32_t port, const Operator& source, uint32_t output);
  Operator& SetInput(const std::string& port, const OutHandler& source);
  Operator& SetInput(const char* port, const OutHandler& source);
  Operator& AddControlInput(const Operator& source);

#define GE_SET_ATTR(T)                               \
  Operator& SetAttr(const std::string& name, T value); \
  Operator& SetAttr(const char* name, T value);
  GE_SET_ATTR(int64_t)
  GE_SET_ATTR(int32_t)
  GE_SET_ATTR(uint32_t)
  GE_SET_ATTR(const std::vector<int64_t>&)
  GE_SET_ATTR(const std::vector<int32_t>&)
  GE_SET_ATTR(const std::vector<uint32_t>&)
  GE_SET_ATTR(std::initializer_list<int64_t>&&)
  GE_SET_ATTR(float)
  GE_SET_ATTR(const std::vector<float>&)
  GE_SET_ATTR(bool)
  GE_SET_ATTR(const std::vector<bool>&)
  GE_SET_ATTR(const Tensor&)
  GE_SET_ATTR(const std::vector<Tensor>&)
  GE_SET_ATTR(const std::vector<uint8_t>&)
  GE_SET_ATTR(const std::vector<std::vector<int64_t>>&)
  GE_SET_ATTR(const std::vector<DataType>&)
  GE_SET_ATTR(const DataType&)
  GE_SET_ATTR(const NamedAttrs&)
  GE_SET_ATTR(const std::vector<NamedAttrs>&)
  GE_SET_ATTR(AttrValue&&)
#undef GE_SET_ATTR
  Operator& SetAttr(const std::string& name, const std::string& value);
  Operator& SetAttr(const char* name, const char* value);
  Operator& SetAttr(const char* name, const AscendString& value);
  Operator& SetAttr(const std::string& name, const std::vector<std::string>& value);
  Operator& SetAttr(const char* name, const std::vector<AscendString>& values);

  graphStatus UpdateInputDesc(const std::string& port, const TensorDesc& desc);
  graphStatus UpdateInputDesc(const char* port, const TensorDesc& desc);
  graphStatus UpdateOutputDesc(const std::string& port, const TensorDesc& desc);
  graphStatus UpdateOutputDesc(const char* port, const TensorDesc& desc);

  Record* record() const { return record_; }

 protected:
  Operator& SetInput(const std::string& port, uint32_t index, const Operator& source);
  Operator& SetInput(const char* port, uint32_t index, const Operator& source);
  Operator& SetInput(const std::string& port, uint32_t index, const Operator& source,
                     const std::string& output);
  Operator& SetInput(const char* port, uint32_t index, const Operator& source, const char* output);
  void DynamicInputRegister(const std::string& port, uint32_t count, bool push_back = true);
  void DynamicInputRegister(const char* port, uint32_t count, bool push_back = true);
  void DynamicOutputRegister(const std::string& port, uint32_t count, bool push_back = true);
  void DynamicOutputRegister(const char* port, uint32_t count, bool push_back = true);

 private:
  Record* record_;
};

}  // namespace ge
