// The simulator's side of GE: records graphs as JSON and hands them to Python.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "ge/ge_api.h"
#include "ge/ge_ir_build.h"
#include "graph/graph.h"
#include "graph/operator_factory.h"
#include "callbacks.h"

namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    char escape[8];
    if (c == '"' || c == '\\' || c < 0x20) {
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      out += escape;
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + '"';
}

template <typename T, typename Show>
std::string list(const std::vector<T>& items, Show show) {
  std::string out = "[";
  for (size_t k = 0; k < items.size(); ++k) out += (k ? "," : "") + show(items[k]);
  return out + "]";
}

std::string integer(int64_t v) { return std::to_string(v); }

std::string real(float v) {
  char text[40];
  std::snprintf(text, sizeof text, "\"%a\"", static_cast<double>(v));
  return text;
}

std::string desc_text(const ge::TensorDesc& d) {
  return "{\"dims\":" + list(d.GetShape().GetDims(), integer) +
         ",\"origin\":" + list(d.GetOriginShape().GetDims(), integer) + ",\"format\":" + integer(d.GetFormat()) + ",\"dtype\":" + integer(d.GetDataType()) + "}";
}

std::string hex(const std::vector<uint8_t>& bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string out;
  for (uint8_t b : bytes) out += {digits[b >> 4], digits[b & 15]};
  return quoted(out);
}

}  // namespace

Callbacks python = {};
thread_local char message[MESSAGE_ROOM] = "";

extern "C" void dicp_simulator_connect(Callbacks callbacks) { python = callbacks; }

namespace ge {

struct Record {
  int users = 1;
  std::string name, type;
  struct Input {
    std::string port;
    int64_t index;  // -1: not a dynamic port
    Record* source;
    std::string output;
  };
  std::vector<Input> inputs;
  std::vector<Record*> controls;  // have to run before
  std::vector<std::string> attrs, descs, counts;
};

static void release(Record* r) {
  if (--r->users > 0) return;
  for (auto& input : r->inputs) release(input.source);
  for (Record* control : r->controls) release(control);
  delete r;
}

Operator::Operator(const char* name, const char* type) : record_(new Record) {
  record_->name = name;
  record_->type = type;
}
Operator OperatorFactory::CreateOperator(const char* name, const char* type) {
  return Operator(name, type);
}
Operator::Operator(const Operator& other) : record_(other.record_) { ++record_->users; }
Operator& Operator::operator=(const Operator& other) {
  ++other.record_->users;
  release(record_);
  record_ = other.record_;
  return *this;
}
Operator::~Operator() { release(record_); }

static void connect(Record* r, const char* port, int64_t index, const Operator& source,
                    const char* output) {
  ++source.record()->users;
  r->inputs.push_back({port, index, source.record(), output});
}
Operator& Operator::SetInput(const char* port, const Operator& s) {
  return connect(record_, port, -1, s, ""), *this;
}
Operator& Operator::SetInput(const char* port, const Operator& s, const char* output) {
  return connect(record_, port, -1, s, output), *this;
}
Operator& Operator::SetInput(const char* port, uint32_t index, const Operator& s) {
  return connect(record_, port, index, s, ""), *this;
}
Operator& Operator::SetInput(const char* port, uint32_t index, const Operator& s,
                             const char* output) {
  return connect(record_, port, index, s, output), *this;
}
Operator& Operator::AddControlInput(const Operator& source) {
  ++source.record()->users;
  return record_->controls.push_back(source.record()), *this;
}
void Operator::DynamicInputRegister(const char* port, uint32_t count, bool) {
  record_->counts.push_back("[\"input\"," + quoted(port) + "," + integer(count) + "]");
}
void Operator::DynamicOutputRegister(const char* port, uint32_t count, bool) {
  record_->counts.push_back("[\"output\"," + quoted(port) + "," + integer(count) + "]");
}

static Operator& put(Operator& op, const char* name, const char* type, const std::string& value) {
  op.record()->attrs.push_back("[" + quoted(name) + "," + quoted(type) + "," + value + "]");
  return op;
}
Operator& Operator::SetAttr(const char* n, bool v) {
  return put(*this, n, "Bool", v ? "true" : "false");
}
Operator& Operator::SetAttr(const char* n, int64_t v) { return put(*this, n, "Int", integer(v)); }
Operator& Operator::SetAttr(const char* n, float v) { return put(*this, n, "Float", real(v)); }
Operator& Operator::SetAttr(const char* n, const char* v) {
  return put(*this, n, "String", quoted(v));
}
Operator& Operator::SetAttr(const char* n, const DataType& v) { return put(*this, n, "Type", integer(v)); }
Operator& Operator::SetAttr(const char* n, const Tensor& v) {
  return put(*this, n, "Tensor",
             "{\"desc\":" + desc_text(v.GetTensorDesc()) + ",\"data\":" + hex(v.bytes()) + "}");
}
Operator& Operator::SetAttr(const char* n, const std::vector<int64_t>& v) {
  return put(*this, n, "ListInt", list(v, integer));
}
Operator& Operator::SetAttr(const char* n, const std::vector<float>& v) {
  return put(*this, n, "ListFloat", list(v, real));
}
graphStatus Operator::UpdateInputDesc(const char* port, const TensorDesc& d) {
  record_->descs.push_back("[\"input\"," + quoted(port) + "," + desc_text(d) + "]");
  return GRAPH_SUCCESS;
}
graphStatus Operator::UpdateOutputDesc(const char* port, const TensorDesc& d) {
  record_->descs.push_back("[\"output\"," + quoted(port) + "," + desc_text(d) + "]");
  return GRAPH_SUCCESS;
}

struct GraphRecord {
  std::string name;
  std::vector<Operator> inputs, targets;
  std::vector<std::pair<Operator, std::vector<size_t>>> outputs;
};

Graph::Graph(const char* name) : record_(new GraphRecord) { record_->name = name; }
Graph::~Graph() { delete record_; }
Graph& Graph::SetInputs(const std::vector<Operator>& inputs) {
  record_->inputs = inputs;
  return *this;
}
Graph& Graph::SetOutputs(const std::vector<std::pair<Operator, std::vector<size_t>>>& outputs) {
  record_->outputs = outputs;
  return *this;
}
Graph& Graph::SetTargets(const std::vector<Operator>& targets) {
  record_->targets = targets;
  return *this;
}

// Operators that the outputs and targets need, each after its own inputs and what it waits for.
static void collect(Record* root, std::unordered_set<Record*>& seen, std::vector<Record*>& order) {
  std::vector<std::pair<Record*, size_t>> stack;
  if (seen.insert(root).second) stack.push_back({root, 0});
  while (!stack.empty()) {
    auto& [record, next] = stack.back();
    size_t inputs = record->inputs.size();
    if (next == inputs + record->controls.size()) {
      order.push_back(record);
      stack.pop_back();
      continue;
    }
    Record* source =
        next < inputs ? record->inputs[next].source : record->controls[next - inputs];
    ++next;
    if (seen.insert(source).second) stack.push_back({source, 0});
  }
}

static std::string text_of(const Record* r) {
  auto same = [](const std::string& s) { return s; };
  auto input = [](const Record::Input& i) {
    return "[" + quoted(i.port) + "," + integer(i.index) + "," + quoted(i.source->name) + "," +
           quoted(i.output) + "]";
  };
  return "{\"name\":" + quoted(r->name) + ",\"type\":" + quoted(r->type) +
         ",\"inputs\":" + list(r->inputs, input) +
         ",\"controls\":" + list(r->controls, [](Record* c) { return quoted(c->name); }) +
         ",\"attrs\":" + list(r->attrs, same) +
         ",\"descs\":" + list(r->descs, same) + ",\"counts\":" + list(r->counts, same) + "}";
}

static std::string text_of(const GraphRecord& g) {
  std::unordered_set<Record*> seen;
  std::vector<Record*> order;
  for (auto& op : g.inputs) collect(op.record(), seen, order);
  for (auto& out : g.outputs) collect(out.first.record(), seen, order);
  for (auto& op : g.targets) collect(op.record(), seen, order);
  auto name = [](const Operator& op) { return quoted(op.record()->name); };
  auto number = [](size_t k) { return integer(static_cast<int64_t>(k)); };
  auto output = [&](const std::pair<Operator, std::vector<size_t>>& o) {
    return "[" + name(o.first) + "," + list(o.second, number) + "]";
  };
  return "{\"name\":" + quoted(g.name) + ",\"inputs\":" + list(g.inputs, name) +
         ",\"outputs\":" + list(g.outputs, output) +
         ",\"ops\":" + list(order, [](Record* r) { return text_of(r); }) + "}";
}

static BuildOptions global;  // of all builds until the next initialization

graphStatus aclgrphBuildInitialize(BuildOptions& options) { return global = options, GRAPH_SUCCESS; }
void aclgrphBuildFinalize() {}
std::string GEGetErrorMsg() { return message; }

graphStatus aclgrphBuildModel(const Graph& graph, const BuildOptions& options,
                              ModelBufferData& model) {
  std::string text = text_of(*graph.record()), given = "{";
  BuildOptions all = options;
  all.insert(global.begin(), global.end());
  for (auto& option : all) {
    given += (given.size() > 1 ? "," : "") + quoted(option.first.GetString()) + ":" +
             quoted(option.second.GetString());
  }
  given += "}";
  if (python.build(text.c_str(), given.c_str(), message, sizeof message) != 0) return GRAPH_FAILED;
  model.length = text.size();
  model.data.reset(new uint8_t[text.size()], std::default_delete<uint8_t[]>());
  std::memcpy(model.data.get(), text.data(), text.size());
  return GRAPH_SUCCESS;
}

}  // namespace ge
