#include "visible.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace dicp {
namespace {

Runtime vendor;
std::vector<int> visible;

// The function `member` of the runtime, whose first argument is a device.
template <auto member> struct OfDevice;
template <class... Rest, int (*Runtime::*member)(int, Rest...)> struct OfDevice<member> {
  static int call(int device, Rest... rest) { return (vendor.*member)(visible[size_t(device)], rest...); }
};

int count_devices(int* count) {
  *count = int(visible.size());
  return 0;
}

int address_device(const void* address, int* device) {
  const int status = vendor.address_device(address, device);
  const auto found = std::find(visible.begin(), visible.end(), *device);
  *device = found == visible.end() ? -1 : int(found - visible.begin());
  return status;
}

int copy_between(int to_device, void* to, int from_device, const void* from, size_t bytes,
                 dicp_rt_stream stream) {
  return vendor.copy_between(visible[size_t(to_device)], to, visible[size_t(from_device)], from, bytes,
                             stream);
}

}  // namespace

Runtime renumbered(const Runtime& whole, const std::vector<int>& numbers) {
  int count = 0;
  if (whole.device_count(&count) != 0) throw std::runtime_error("counting devices: " + whole.error());
  for (const int number : numbers)
    if (number < 0 || number >= count)
      throw std::invalid_argument("device " + std::to_string(number) + " is to be visible, but the runtime has " +
                                  std::to_string(count) + " devices");
  vendor = whole;
  visible = numbers;
  Runtime made = whole;
  made.device_count = &count_devices;
  made.address_device = &address_device;
  made.copy_between = &copy_between;
#define DICP_OF_DEVICE(name) made.name = &OfDevice<&Runtime::name>::call;
  DICP_OF_DEVICE(set_device)
  DICP_OF_DEVICE(device_properties)
  DICP_OF_DEVICE(device_synchronize)
  DICP_OF_DEVICE(memory_info)
  DICP_OF_DEVICE(malloc)
  DICP_OF_DEVICE(free)
  DICP_OF_DEVICE(copy_to_device)
  DICP_OF_DEVICE(copy_to_host)
  DICP_OF_DEVICE(copy_on_device)
  DICP_OF_DEVICE(fill)
  DICP_OF_DEVICE(stream_create)
  DICP_OF_DEVICE(event_create)
#undef DICP_OF_DEVICE
  return made;
}

}  // namespace dicp
