// The simulator's HLIR: records what a program builds as JSON and hands it to Python.
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "callbacks.h"
#include "dtu/hlir_builder/hlir_builder.h"
#include "dtu/hlir_builder/hlir_builder_client_ops.h"
#include "dtu_compiler/tops_graph_compiler.h"

namespace {

template <typename T, typename Show>
std::string list(const std::vector<T>& items, Show show) {
  std::string out = "[";
  for (size_t k = 0; k < items.size(); ++k) out += (k ? "," : "") + show(items[k]);
  return out + "]";
}

std::string text(int64_t v) { return std::to_string(v); }
std::string text(bool v) { return v ? "true" : "false"; }
std::string text(float v) {
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.9g", v);
  return digits;
}
std::string text(const char* v) { return std::string("\"") + v + "\""; }
std::string text(const builder::Dims& v) {
  return list(v, [](int64_t k) { return text(k); });
}
std::string text(const builder::Lists& v) {
  return list(v, [](const builder::Dims& k) { return text(k); });
}
std::string text(const builder::Names& v) {
  return list(v, [](const char* k) { return text(k); });
}
std::string text(const builder::DimensionNumbers& v) { return text(v.lists); }
std::string text(const builder::Type& t) {
  return "[" + text(int64_t{t.GetPrimitiveType().code()}) + "," + text(t.GetShape()) + "]";
}

const size_t WIDTHS[] = {2, 4, 8, 1, 2, 4, 8, 1, 4, 1};

std::string hex(const builder::Type& type, const void* data) {
  static const char digits[] = "0123456789abcdef";
  size_t count = WIDTHS[type.GetPrimitiveType().code()];
  for (int64_t size : type.GetShape()) count *= static_cast<size_t>(size);
  std::string out = "\"";
  for (size_t k = 0; k < count; ++k) {
    unsigned char byte = static_cast<const unsigned char*>(data)[k];
    out += {digits[byte >> 4], digits[byte & 15]};
  }
  return out + "\"";
}

}  // namespace

Callbacks python = {};
thread_local char message[MESSAGE_ROOM] = "";

extern "C" void dicp_simulator_connect(Callbacks callbacks) { python = callbacks; }

namespace builder {

struct Graph {
  std::vector<std::string> ops, outputs;
  std::map<int, std::string> extra;  // attributes set later

  Op record(const char* kind, const std::vector<Op>& inputs, const std::string& attrs) {
    std::string numbers = list(inputs, [](const Op& op) { return text(int64_t{op.number()}); });
    ops.push_back("{\"kind\":" + text(kind) + ",\"in\":" + numbers + ",\"attrs\":{" + attrs + "}");
    return Op(this, static_cast<int>(ops.size()) - 1);
  }
};

}  // namespace builder

class hlir::Module {
 public:
  std::map<std::string, builder::Graph> functions{{"main", {}}};
  bool infers = false;

  std::string json() {
    std::string out = std::string("{\"infers\":") + text(infers) + ",\"functions\":{";
    for (auto& [name, graph] : functions) {
      out += (out.back() == '{' ? "" : ",") + text(name.c_str()) + ":{\"ops\":[";
      for (size_t k = 0; k < graph.ops.size(); ++k) {
        auto found = graph.extra.find(static_cast<int>(k));
        out += (k ? "," : "") + graph.ops[k] + ",\"extra\":{" +
               (found == graph.extra.end() ? "" : found->second) + "}}";
      }
      out += "],\"outputs\":" + list(graph.outputs, [](const std::string& s) { return s; }) + "}";
    }
    return out + "}}";
  }
};

namespace builder {

Builder::Builder() : module_(new hlir::Module) {}
Builder::~Builder() = default;
void Builder::SetShapeInference(bool on) { module_->infers = on; }
void Builder::AddFunc(const char* name) { module_->functions[name]; }
Graph* Builder::function(const char* name) { return &module_->functions.at(name); }
std::shared_ptr<hlir::Module> Builder::GetModule() { return module_; }
Op Builder::CreateInput(const Type& type, const char* name) {
  return function(name)->record("Input", {}, "\"type\":" + text(type));
}
void Builder::SetOutput(const std::vector<Op>& outputs, const char* name) {
  for (const Op& op : outputs) function(name)->outputs.push_back(text(int64_t{op.number()}));
}
void Op::SetAttribute(const char* name, const Attribute& value) {
  std::string& extra = graph_->extra[number_];
  extra += (extra.empty() ? "" : ",") + text(name) + ":" + text(value.text());
}

Op Const(std::shared_ptr<Builder> b, void* data, const Type& type) {
  return b->function("main")->record(
      "Const", {}, "\"type\":" + text(type) + ",\"data\":" + hex(type, data));
}
Op Iota(std::shared_ptr<Builder> b, int64_t dimension, const Type& type) {
  return b->function("main")->record(
      "Iota", {}, "\"dimension\":" + text(dimension) + ",\"type\":" + text(type));
}

namespace {

struct Call {  // the arguments of one operator, sorted into operands and attributes
  std::vector<Op> operands;
  std::string attrs;

  void take(const std::string&, const Op& operand) { operands.push_back(operand); }
  void take(const std::string&, const std::vector<Op>& given) { operands = given; }
  template <typename T>
  void take(const std::string& name, const T& value) {
    attrs += (attrs.empty() ? "" : ",") + text(name.c_str()) + ":" + text(value);
  }
};

// `names`, separated by commas, are those of the arguments.
template <typename... Arguments>
Op record(const char* kind, std::string names, const Arguments&... arguments) {
  Call call;
  auto next = [&names] {
    std::string name = names.substr(0, names.find(','));
    names.erase(0, name.size() + 2);
    return name;
  };
  (call.take(next(), arguments), ...);
  return call.operands.at(0).graph()->record(kind, call.operands, call.attrs);
}

}  // namespace

#define DICP_DEFINE(name, parameters, ...) \
  Op name parameters { return record(#name, #__VA_ARGS__, __VA_ARGS__); }
DICP_OPERATORS(DICP_DEFINE)

}  // namespace builder

// ---- the graph compiler: its binary is a line of sizes, then the recorded module -----------------

struct topsgraphProgramRecord {
  std::string module, binary;
};

extern "C" {

topsgraphResult topsgraphCreateProgramFromModule(topsgraphProgram* program, hlir::Module* module) {
  *program = new topsgraphProgramRecord{module->json(), ""};
  return TOPSGRAPH_SUCCESS;
}

topsgraphResult topsgraphCompileProgram(topsgraphProgram program, int count, const char** options) {
  std::string given = list(std::vector<const char*>(options, options + count),
                           [](const char* option) { return text(option); });
  if (python.build(program->module.c_str(), given.c_str(), message, sizeof message) != 0) {
    return TOPSGRAPH_FAILURE;
  }
  program->binary = message + ("\n" + program->module);
  message[0] = 0;
  return TOPSGRAPH_SUCCESS;
}

topsgraphResult topsgraphGetBinSize(topsgraphProgram program, size_t* size) {
  return *size = program->binary.size(), TOPSGRAPH_SUCCESS;
}
topsgraphResult topsgraphGetBin(topsgraphProgram program, char* binary) {
  return std::memcpy(binary, program->binary.data(), program->binary.size()), TOPSGRAPH_SUCCESS;
}
topsgraphResult topsgraphDestroyProgram(topsgraphProgram* program) {
  delete *program;
  return *program = nullptr, TOPSGRAPH_SUCCESS;
}

int topsgraphGetProgramLogSize(topsgraphProgram, size_t* size) {
  return *size = std::strlen(message) + 1, 0;
}
int topsgraphGetProgramLog(topsgraphProgram, char* log) { return std::strcpy(log, message), 0; }

}  // extern "C"
