// What the libraries of the simulator share: how Python is reached.
#pragma once
#include <cstddef>
#include <cstdint>

const size_t MESSAGE_ROOM = 65536;

struct Callbacks {
  int (*build)(const char* graph, const char* options, char* message, size_t room);
  int (*load)(const void* model, size_t size, bool with_memory, char* message, size_t room);
  int (*run)(int model, const void* inputs, size_t in, const void* outputs, size_t out,
             char* message, size_t room);
  void (*unload)(int model);
};

struct RunArgument {  // one tensor of a run, as Python reads it
  void* data;
  uint64_t size;
  int64_t rank;  // -1: as the model declares
  const int64_t* dims;
};

extern Callbacks python;
extern thread_local char message[MESSAGE_ROOM];  // of the last failure
