// What torch's C++ asks of a CUDA device while it differentiates tensors without data: there is one, it is device 0, and it has one stream.
// Nothing is marked `override`: the bases of torch 2.11 to 2.15 differ, and what one of them lacks is then a function that nobody calls.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using namespace c10;
constexpr DeviceType CUDA = DeviceType::CUDA;

struct PretendedGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const { return CUDA; }
  Device exchangeDevice(Device) const { return {CUDA, 0}; }
  Device getDevice() const { return {CUDA, 0}; }
  void setDevice(Device) const {}
  void uncheckedSetDevice(Device) const noexcept {}
  Stream getStream(Device) const { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
  Stream exchangeStream(Stream stream) const { return stream; }
  DeviceIndex deviceCount() const noexcept { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const {}
  void block(void*, const Stream&) const {}
  bool queryEvent(void*) const { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept {}
};
}  // namespace

namespace at {
struct PretendedHooks final : CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  void init() const {}
  bool hasCUDA() const { return true; }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  DeviceIndex deviceCount() const { return 1; }
  DeviceIndex getCurrentDevice() const { return 0; }
  bool hasPrimaryContext(DeviceIndex) const { return true; }
};
// Preferred to the hooks of a torch that is built with CUDA, whose library is loaded later and registers its own.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, PretendedHooks)
}  // namespace at

// Called after torch is imported: the last guard that is registered counts.
extern "C" void install_guard() {
  static const PretendedGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
}
