#pragma once

namespace ge {
namespace ir_option {
constexpr const char* SOC_VERSION = "ge.socVersion";
constexpr const char* PRECISION_MODE = "ge.exec.precision_mode";
constexpr const char* ALLOW_HF32 = "ge.exec.allow_hf32";
constexpr const char* INPUT_FORMAT = "input_format";
constexpr const char* INPUT_SHAPE = "input_shape";
constexpr const char* DYNAMIC_DIMS = "ge.dynamicDims";
}  // namespace ir_option
}  // namespace ge
