#pragma once
#include "graph/operator.h"

namespace ge {

class OperatorFactory {
 public:
  static Operator CreateOperator(const char* name, const char* type) { return {name, type}; }
};

}  // namespace ge
