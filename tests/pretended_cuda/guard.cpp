// Answers what torch's C++ code asks of a CUDA device while it differentiates tensors without data: there is one device, number 0, with one stream.
// No function is marked `override`, as the base classes of torch 2.11 to 2.15 differ; a function that a base class lacks is never called.
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
// These hooks have priority over those of a torch that is built with CUDA, whose library is loaded later and registers its own.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, PretendedHooks)
}  // namespace at

// Call this after torch is imported, because the guard that was registered last counts.
extern "C" void install_guard() {
  static const PretendedGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
}
