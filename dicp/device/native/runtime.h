// The interface between dicp's eager device and a vendor's runtime.
//
// A vendor exports these functions from one shared library. Every function returns 0, or a number
// that is not 0 and leaves a text for dicp_rt_last_error of the same thread. Devices are numbered
// from 0, sizes are bytes, times are milliseconds. A stream of NULL makes a copy synchronous.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dicp_rt_stream_s* dicp_rt_stream;
typedef struct dicp_rt_event_s* dicp_rt_event;
typedef int (*dicp_rt_task)(void* argument);

typedef struct {
  char name[128];
  uint64_t total_memory;
  int32_t major, minor, multi_processor_count;
  int32_t host_addressable;  // 1: the host reads and writes device memory through its addresses
} dicp_rt_properties;

int dicp_rt_device_count(int* count);
int dicp_rt_set_device(int device);
int dicp_rt_device_properties(int device, dicp_rt_properties* properties);
int dicp_rt_device_synchronize(int device);
int dicp_rt_memory_info(int device, size_t* free_bytes, size_t* total_bytes);

int dicp_rt_malloc(int device, size_t bytes, void** address);
int dicp_rt_free(int device, void* address);
int dicp_rt_host_malloc(size_t bytes, void** address);  // pinned: copies from it may be asynchronous
int dicp_rt_host_free(void* address);
int dicp_rt_address_device(const void* address, int* device);  // -1: not a device's memory

int dicp_rt_copy_to_device(int device, void* to, const void* from, size_t bytes, dicp_rt_stream);
int dicp_rt_copy_to_host(int device, void* to, const void* from, size_t bytes, dicp_rt_stream);
int dicp_rt_copy_on_device(int device, void* to, const void* from, size_t bytes, dicp_rt_stream);
int dicp_rt_copy_between(int to_device, void* to, int from_device, const void* from, size_t bytes,
                         dicp_rt_stream);
int dicp_rt_fill(int device, void* to, int value, size_t bytes, dicp_rt_stream);

int dicp_rt_stream_create(int device, int priority, dicp_rt_stream* stream);  // below 0: urgent
int dicp_rt_stream_destroy(dicp_rt_stream stream);
int dicp_rt_stream_synchronize(dicp_rt_stream stream);
int dicp_rt_stream_idle(dicp_rt_stream stream, int* idle);
int dicp_rt_stream_wait(dicp_rt_stream stream, dicp_rt_event event);
// Runs `task` after what the stream holds; a result that is not 0 is an error of the stream, which
// its next synchronization returns. `bytes` estimates the memory traffic.
int dicp_rt_stream_launch(dicp_rt_stream stream, dicp_rt_task task, void* argument, size_t bytes);

int dicp_rt_event_create(int device, int timing, dicp_rt_event* event);
int dicp_rt_event_destroy(dicp_rt_event event);
int dicp_rt_event_record(dicp_rt_event event, dicp_rt_stream stream);
int dicp_rt_event_done(dicp_rt_event event, int* done);  // an event never recorded is done
int dicp_rt_event_synchronize(dicp_rt_event event);
int dicp_rt_event_elapsed(dicp_rt_event start, dicp_rt_event end, double* milliseconds);

int dicp_rt_last_error(char* text, size_t bytes);

// Optional, all or none: collectives between devices of several processes. A communicator is one
// process's device among those that were created with the same identifier, which one process makes
// and the others are sent. Each member makes the same calls in the same order; they are asynchronous
// on `stream`. DICP_RT_UNSUPPORTED says, before anything is exchanged, that the library lacks the
// dtype or the reduction; every member has to get the same answer.
typedef struct dicp_rt_communicator_s* dicp_rt_communicator;
#define DICP_RT_IDENTIFIER_BYTES 8192
#define DICP_RT_UNSUPPORTED 0x44494350  // no status of a vendor's
enum { DICP_RT_UINT8, DICP_RT_INT8, DICP_RT_INT32, DICP_RT_INT64,
       DICP_RT_FLOAT16, DICP_RT_BFLOAT16, DICP_RT_FLOAT32, DICP_RT_FLOAT64 };  // dtypes
enum { DICP_RT_SUM, DICP_RT_PRODUCT, DICP_RT_MIN, DICP_RT_MAX, DICP_RT_AVG };  // reductions

int dicp_rt_communicator_identifier(void* identifier);
int dicp_rt_communicator_create(int device, const void* identifier, int rank, int size,
                                dicp_rt_communicator* communicator);
int dicp_rt_communicator_destroy(dicp_rt_communicator communicator);
// Of all_gather and all_to_all, `bytes` is what one member gives one member; of reduce_scatter,
// `count` is the elements that one member gets. In place, `from` is `to` of all_reduce, the member's
// own part of `to` of all_gather, and has the member's own part as `to` of reduce_scatter.
int dicp_rt_all_reduce(dicp_rt_communicator, const void* from, void* to, size_t count, int dtype,
                       int reduction, dicp_rt_stream);
int dicp_rt_reduce_scatter(dicp_rt_communicator, const void* from, void* to, size_t count,
                           int dtype, int reduction, dicp_rt_stream);
int dicp_rt_broadcast(dicp_rt_communicator, void* data, size_t bytes, int root, dicp_rt_stream);
int dicp_rt_all_gather(dicp_rt_communicator, const void* from, void* to, size_t bytes,
                       dicp_rt_stream);
int dicp_rt_all_to_all(dicp_rt_communicator, const void* from, void* to, size_t bytes,
                       dicp_rt_stream);

#ifdef __cplusplus
}
#endif
