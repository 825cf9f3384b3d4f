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

#ifdef __cplusplus
}
#endif
