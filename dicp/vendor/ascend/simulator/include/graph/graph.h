#pragma once
#include <string>
#include <utility>
#include <vector>

#include "graph/operator.h"

namespace ge {

struct GraphRecord;

// Where a function is declared here, all its public overloads are: a call that is ambiguous with
// CANN's headers is ambiguous with these.
class Graph {
 public:
  Graph();
  explicit Graph(const std::string& name);
  explicit Graph(const char* name);
  Graph(const Graph&) = delete;
  ~Graph();
  Graph& SetInputs(const std::vector<Operator>& inputs);
  Graph& SetOutputs(const std::vector<Operator>& outputs);
  Graph& SetOutputs(const std::vector<std::pair<Operator, std::vector<size_t>>>& outputs);
  Graph& SetOutputs(const std::vector<std::pair<Operator, std::string>>& outputs);
  Graph& SetOutputs(const std::vector<std::pair<Operator, AscendString>>& outputs);
  Graph& SetTargets(const std::vector<Operator>& targets);

  GraphRecord* record() const { return record_; }

 private:
  GraphRecord* record_;
};

}  // namespace ge
