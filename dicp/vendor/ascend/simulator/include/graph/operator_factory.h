#pragma once
#include <string>

#include "graph/operator.h"

namespace ge {

class OperatorFactory {
 public:
  static Operator CreateOperator(const std::string& name, const std::string& type);
  static Operator CreateOperator(const char* name, const char* type);
  static bool IsExistOp(const std::string& type);
  static bool IsExistOp(const char* type);
};

}  // namespace ge
