// The part of the TopsRider graph compiler's interface that the driver uses.
#pragma once
#include <cstddef>

namespace hlir {
class Module;
}

extern "C" {
typedef struct topsgraphProgramRecord* topsgraphProgram;
typedef enum { TOPSGRAPH_SUCCESS = 0, TOPSGRAPH_FAILURE = 1 } topsgraphResult;

topsgraphResult topsgraphCreateProgramFromModule(topsgraphProgram* program, hlir::Module* module);
topsgraphResult topsgraphCompileProgram(topsgraphProgram program, int count, const char** options);
topsgraphResult topsgraphGetBinSize(topsgraphProgram program, size_t* size);
topsgraphResult topsgraphGetBin(topsgraphProgram program, char* binary);
topsgraphResult topsgraphDestroyProgram(topsgraphProgram* program);
}
