// The part of the HLIR builder's interface that generated graphs use, declared for the simulator.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace hlir {
class Module;
}

namespace builder {

class PrimitiveType {
 public:
  static PrimitiveType F16() { return PrimitiveType(0); }
  static PrimitiveType F32() { return PrimitiveType(1); }
  static PrimitiveType F64() { return PrimitiveType(2); }
  static PrimitiveType S8() { return PrimitiveType(3); }
  static PrimitiveType S16() { return PrimitiveType(4); }
  static PrimitiveType S32() { return PrimitiveType(5); }
  static PrimitiveType S64() { return PrimitiveType(6); }
  static PrimitiveType U8() { return PrimitiveType(7); }
  static PrimitiveType U32() { return PrimitiveType(8); }
  static PrimitiveType PRED() { return PrimitiveType(9); }
  int code() const { return code_; }

 private:
  explicit PrimitiveType(int code) : code_(code) {}
  int code_;
};

using Dims = std::vector<int64_t>;

class Type {
 public:
  explicit Type(PrimitiveType element) : element_(element) {}
  Type(const Dims& dims, PrimitiveType element) : dims_(dims), element_(element) {}
  const Dims& GetShape() const { return dims_; }
  PrimitiveType GetPrimitiveType() const { return element_; }

 private:
  Dims dims_;
  PrimitiveType element_;
};

class Attribute {
 public:
  explicit Attribute(const char* text) : text_(text) {}
  const char* text() const { return text_; }

 private:
  const char* text_;
};

class Builder;
struct Graph;  // what the simulator remembers of one function

class Op {
 public:
  Op() = default;
  Op(Graph* graph, int number) : graph_(graph), number_(number) {}
  void SetAttribute(const char* name, const Attribute& value);
  Graph* graph() const { return graph_; }
  int number() const { return number_; }

 private:
  Graph* graph_ = nullptr;
  int number_ = -1;
};

class Builder {
 public:
  Builder();
  ~Builder();
  void SetShapeInference(bool on);
  void AddFunc(const char* name);
  Op CreateInput(const Type& type, const char* function = "main");
  void SetOutput(const std::vector<Op>& outputs, const char* function = "main");
  std::shared_ptr<hlir::Module> GetModule();
  Graph* function(const char* name);

 private:
  std::shared_ptr<hlir::Module> module_;
};

}  // namespace builder
