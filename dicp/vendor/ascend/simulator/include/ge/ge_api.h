#pragma once
#include <string>

namespace ge {

std::string GEGetErrorMsg();

}  // namespace ge
