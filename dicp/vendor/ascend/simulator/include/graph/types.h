// Stand-ins for CANN's declarations, just those that generated graphs use.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ge {

using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0;
constexpr graphStatus GRAPH_FAILED = 0xFFFFFFFF;

enum Format { FORMAT_NCHW = 0, FORMAT_NHWC = 1, FORMAT_ND = 2, FORMAT_NC1HWC0 = 3,
              FORMAT_FRACTAL_Z = 4, FORMAT_FRACTAL_NZ = 29, FORMAT_NCDHW = 30 };

enum DataType { DT_FLOAT = 0, DT_FLOAT16 = 1, DT_INT8 = 2, DT_INT32 = 3, DT_UINT8 = 4,
                DT_INT16 = 6, DT_UINT16 = 7, DT_UINT32 = 8, DT_INT64 = 9, DT_UINT64 = 10,
                DT_DOUBLE = 11, DT_BOOL = 12, DT_BF16 = 27 };

}  // namespace ge
