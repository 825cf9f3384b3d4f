// Only some devices of the runtime in use: the process numbers those from 0, in the order given.
#pragma once
#include <vector>

#include "memory.h"

namespace dicp {

// Functions of `whole` that take the process's numbers. `numbers`: the runtime's number of each device.
// Raises std::invalid_argument where the runtime has no such device. To be called once.
Runtime renumbered(const Runtime& whole, const std::vector<int>& numbers);

}  // namespace dicp
