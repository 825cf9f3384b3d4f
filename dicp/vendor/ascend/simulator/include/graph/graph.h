#pragma once
#include <utility>

#include "graph/operator.h"

namespace ge {

struct GraphRecord;

class Graph {
 public:
  explicit Graph(const char* name);
  Graph(const Graph&) = delete;
  ~Graph();
  Graph& SetInputs(const std::vector<Operator>& inputs);
  Graph& SetOutputs(const std::vector<std::pair<Operator, std::vector<size_t>>>& outputs);
  Graph& SetTargets(const std::vector<Operator>& targets);

  GraphRecord* record() const { return record_; }

 private:
  GraphRecord* record_;
};

}  // namespace ge
