// How an operator's class is made of its prototype.
#pragma once
#include "graph/operator.h"

#define GE_OPERATOR(T)                                  \
  class T : public Operator {                           \
    using This = T;                                     \
                                                        \
   public:                                              \
    explicit T(const char* name) : Operator(name, #T) {}

#define GE_INPUT(x)                                                                          \
  This& set_input_##x(Operator& v) { return SetInput(#x, v), *this; }                        \
  This& set_input_##x##_by_name(Operator& v, const char* output) {                           \
    return SetInput(#x, v, output), *this;                                                   \
  }                                                                                          \
  graphStatus update_input_desc_##x(const TensorDesc& d) { return UpdateInputDesc(#x, d); }

#define GE_DYNAMIC_INPUT(x)                                                                  \
  This& create_dynamic_input_##x(uint32_t n) { return DynamicInputRegister(#x, n), *this; }  \
  This& set_dynamic_input_##x(uint32_t k, Operator& v) { return SetInput(#x, k, v), *this; } \
  This& set_dynamic_input_##x(uint32_t k, Operator& v, const char* output) {                 \
    return SetInput(#x, k, v, output), *this;                                                \
  }

#define GE_OUTPUT(x) \
  graphStatus update_output_desc_##x(const TensorDesc& d) { return UpdateOutputDesc(#x, d); }

#define GE_DYNAMIC_OUTPUT(x) \
  This& create_dynamic_output_##x(uint32_t n) { return DynamicOutputRegister(#x, n), *this; }

#define GE_ATTR(x, T) \
  This& set_attr_##x(T v) { return SetAttr(#x, v), *this; }

#define GE_END \
  }            \
  ;
