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
    std::vector<Op> given = inputs;
    std::string numbers = list(given, [](const Op& op) { return text(int64_t{op.number()}); });
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

#define ATTR(name) (std::string("\"" #name "\":") + text(name))
#define AND +"," +

DotDimensionNumbers::DotDimensionNumbers(const Dims& a, const Dims& b, const Dims& c, const Dims& d)
    : lists{a, b, c, d} {}
GatherDimensionNumbers::GatherDimensionNumbers(const Dims& a, const Dims& b, const Dims& c,
                                               int64_t d)
    : lists{a, b, c, {d}} {}
ScatterDimensionNumbers::ScatterDimensionNumbers(const Dims& a, const Dims& b, const Dims& c,
                                                 int64_t d)
    : lists{a, b, c, {d}} {}
ConvDimensionNumbers::ConvDimensionNumbers(int64_t a, int64_t b, const Dims& c, int64_t d,
                                           int64_t e, const Dims& f, int64_t g, int64_t h,
                                           const Dims& i)
    : lists{{a}, {b}, c, {d}, {e}, f, {g}, {h}, i} {}

Op Const(std::shared_ptr<Builder> b, void* data, const Type& type) {
  return b->function("main")->record("Const", {}, ATTR(type) AND "\"data\":" + hex(type, data));
}
Op Iota(std::shared_ptr<Builder> b, int64_t dimension, const Type& type) {
  return b->function("main")->record("Iota", {}, ATTR(dimension) AND ATTR(type));
}

namespace {
template <typename... Rest>
Op record(const char* kind, const std::string& attrs, Op first, Rest... rest) {
  return first.graph()->record(kind, {first, rest...}, attrs);
}
}  // namespace

Op GetTupleElement(Op t, int64_t index) { return record("GetTupleElement", ATTR(index), t); }
#define DEFINE(name) \
  Op name(Op x) { return record(#name, "", x); }
DICP_UNARY(DEFINE)
#undef DEFINE
#define DEFINE(name) \
  Op name(Op x, Op y) { return record(#name, "", x, y); }
DICP_BINARY(DEFINE)
#undef DEFINE
#define DEFINE(name) \
  Op name(Op x, bool keepdim, const Dims& axes) { return record(#name, ATTR(keepdim) AND ATTR(axes), x); }
DICP_REDUCTION(DEFINE)
#undef DEFINE

Op Compare(Op x, Op y, const char* direction) { return record("Compare", ATTR(direction), x, y); }
Op Select(Op c, Op x, Op y) { return record("Select", "", c, x, y); }
Op Convert(Op x, const Type& type) { return record("Convert", ATTR(type), x); }
Op Gelu(Op x, bool approximate) { return record("Gelu", ATTR(approximate), x); }
Op GeluGrad(Op dy, Op x, bool approximate) { return record("GeluGrad", ATTR(approximate), dy, x); }
Op HardSwishGrad(Op dy, Op x, float offset, float threshold, float scale) {
  return record("HardSwishGrad", ATTR(offset) AND ATTR(threshold) AND ATTR(scale), dy, x);
}
Op Reshape(Op x, const Type& type) { return record("Reshape", ATTR(type), x); }
Op BroadcastInDim(Op x, const Dims& dims, const Type& type) {
  return record("BroadcastInDim", ATTR(dims) AND ATTR(type), x);
}
Op Transpose(Op x, const Dims& perm) { return record("Transpose", ATTR(perm), x); }
Op Slice(Op x, const Dims& start, const Dims& limit, const Dims& stride) {
  return record("Slice", ATTR(start) AND ATTR(limit) AND ATTR(stride), x);
}
Op Reverse(Op x, const Dims& dims, const Type& type) {
  return record("Reverse", ATTR(dims) AND ATTR(type), x);
}
Op Concatenate(const std::vector<Op>& xs, int64_t axis) {
  return xs.at(0).graph()->record("Concatenate", xs, ATTR(axis));
}
Op ArgMax(Op x, int64_t axis, bool keepdim) {
  return record("ArgMax", ATTR(axis) AND ATTR(keepdim), x);
}
Op ArgMin(Op x, int64_t axis, bool keepdim) {
  return record("ArgMin", ATTR(axis) AND ATTR(keepdim), x);
}
Op TopK(Op x, int64_t k, int64_t axis, bool sorted, bool largest) {
  return record("TopK", ATTR(k) AND ATTR(axis) AND ATTR(sorted) AND ATTR(largest), x);
}
Op Softmax(Op x, int64_t axis, bool accurate) {
  return record("Softmax", ATTR(axis) AND ATTR(accurate), x);
}
#define DIMS (std::string("\"dims\":") + text(dims.lists))
Op DotGeneral(Op lhs, Op rhs, const DotDimensionNumbers& dims) {
  return record("DotGeneral", DIMS, lhs, rhs);
}
Op Gather(Op x, Op indices, const GatherDimensionNumbers& dims, const Dims& sizes, bool sorted,
          const Type& type) {
  return record("Gather", DIMS AND ATTR(sizes) AND ATTR(sorted) AND ATTR(type), x, indices);
}
Op Scatter(Op x, Op indices, Op updates, const ScatterDimensionNumbers& dims,
           const Names& regions) {
  return record("Scatter", DIMS AND ATTR(regions), x, indices, updates);
}
Op Conv2D(const std::vector<Op>& xs, int64_t group, const char* auto_pad, const char* layout,
          const Dims& stride, const Dims& pad, const Dims& dilation) {
  return xs.at(0).graph()->record("Conv2D", xs,
                                  ATTR(group) AND ATTR(auto_pad) AND ATTR(layout) AND ATTR(stride)
                                      AND ATTR(pad) AND ATTR(dilation));
}
Op Conv(Op x, Op filter, const ConvDimensionNumbers& dims, const Dims& strides, const Lists& pads,
        const Dims& lhs_dilation, const Dims& rhs_dilation, const Dims& reversal,
        const char* auto_pad, int64_t feature_groups, int64_t batch_groups,
        const Names& precision) {
  return record("Conv",
                DIMS AND ATTR(strides) AND ATTR(pads) AND ATTR(lhs_dilation) AND ATTR(rhs_dilation)
                    AND ATTR(reversal) AND ATTR(auto_pad) AND ATTR(feature_groups)
                        AND ATTR(batch_groups) AND ATTR(precision),
                x, filter);
}
Op MaxPool2D(Op x, const Dims& ksize, bool ceil_mode, bool indices, const char* auto_pad,
             const char* layout, const Dims& stride, const Dims& pad, const Dims& dilation) {
  return record("MaxPool2D",
                ATTR(ksize) AND ATTR(ceil_mode) AND ATTR(indices) AND ATTR(auto_pad)
                    AND ATTR(layout) AND ATTR(stride) AND ATTR(pad) AND ATTR(dilation),
                x);
}
Op SelectAndScatter(Op x, Op source, Op initial, const Names& regions, const Dims& window,
                    const Dims& strides, const Lists& pads, const Type& type) {
  return record("SelectAndScatter",
                ATTR(regions) AND ATTR(window) AND ATTR(strides) AND ATTR(pads) AND ATTR(type), x,
                source, initial);
}

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
