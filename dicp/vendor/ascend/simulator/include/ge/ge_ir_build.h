#pragma once
#include <map>
#include <memory>
#include <string>

#include "ge/ge_api_types.h"
#include "graph/ascend_string.h"
#include "graph/graph.h"

namespace ge {

struct ModelBufferData {
  std::shared_ptr<uint8_t> data = nullptr;
  uint64_t length = 0;
};

using BuildOptions = std::map<AscendString, AscendString>;

graphStatus aclgrphBuildInitialize(std::map<std::string, std::string> options);
graphStatus aclgrphBuildInitialize(BuildOptions& options);
graphStatus aclgrphBuildModel(const Graph& graph, const std::map<std::string, std::string>& options,
                              ModelBufferData& model);
graphStatus aclgrphBuildModel(const Graph& graph, const BuildOptions& options,
                              ModelBufferData& model);
void aclgrphBuildFinalize();

}  // namespace ge
