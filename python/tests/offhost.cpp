// A device for tests of PyTorch, for machines without one: its memory cannot be touched by the host, and what its
// streams are told to copy they copy as late as they may.
//
// A tensor's address lies in pages that nobody may read or write; the same memory is mapped once more for the device's
// own kernels, which are those of the CPU. A copy that does not have to be waited for lies in the queue of its stream
// until that stream is waited for or does something else. So these end as they would on a GPU on a bad day: an address
// of the device that is used on the host (SIGSEGV, or EFAULT in the kernel), host memory that is used again before it
// was copied, a copy on another stream than the one that it had to follow.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

// Memory

std::mutex memory;
struct Mapped {
  char *kernels;
  size_t size;
};
std::map<char *, Mapped> mapped;    // by the address that tensors have
std::map<char *, size_t> pinned;

char *of_kernels(const void *address) {
  if (address == nullptr) return nullptr;
  auto at = static_cast<char *>(const_cast<void *>(address));
  std::lock_guard<std::mutex> locked(memory);
  auto found = mapped.upper_bound(at);
  TORCH_CHECK(found != mapped.begin(), "no memory of the device");
  --found;
  TORCH_CHECK(at <= found->first + found->second.size, "no memory of the device");
  return found->second.kernels + (at - found->first);
}

void unmap(void *address) {
  std::lock_guard<std::mutex> locked(memory);
  auto found = mapped.find(static_cast<char *>(address));
  munmap(found->second.kernels, found->second.size);
  munmap(found->first, found->second.size);
  mapped.erase(found);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, [](void *) {}, kDevice};
    size_t size = (bytes + 4095) / 4096 * 4096;
    int fd = memfd_create("offhost", 0);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0, "out of memory");
    void *tensors = mmap(nullptr, size, PROT_NONE, MAP_SHARED, fd, 0);
    void *kernels = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    TORCH_CHECK(tensors != MAP_FAILED && kernels != MAP_FAILED, "out of memory");
    std::lock_guard<std::mutex> locked(memory);
    mapped[static_cast<char *>(tensors)] = {static_cast<char *>(kernels), size};
    return {tensors, tensors, unmap, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return unmap; }
  void copy_data(void *to, const void *from, std::size_t count) const override {
    memcpy(of_kernels(to), of_kernels(from), count);
  }
};

struct PinnedAllocator final : c10::Allocator {
  static void release(void *address) {
    std::lock_guard<std::mutex> locked(memory);
    pinned.erase(static_cast<char *>(address));
    free(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void *address = aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::lock_guard<std::mutex> locked(memory);
    pinned[static_cast<char *>(address)] = bytes + 1;
    return {address, address, release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void *to, const void *from, std::size_t count) const override { memcpy(to, from, count); }
};

bool is_pinned(const void *address) {
  auto at = static_cast<char *>(const_cast<void *>(address));
  std::lock_guard<std::mutex> locked(memory);
  auto found = pinned.upper_bound(at);
  return found != pinned.begin() && (--found, at < found->first + found->second);
}

DeviceAllocator device_memory;
PinnedAllocator pinned_memory;
REGISTER_ALLOCATOR(kType, &device_memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void *address) const override { return is_pinned(address); }
  c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
    auto larger = device_memory.allocate(bytes);
    size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) device_memory.copy_data(larger.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
Hooks hooks;

// Streams

std::recursive_mutex running;    // kernels run one after the other
std::map<c10::StreamId, std::deque<std::function<void()>>> queues;
std::atomic<c10::StreamId> newest = 0;
thread_local c10::StreamId current = 0;

void later(std::function<void()> work) {
  std::lock_guard<std::recursive_mutex> locked(running);
  queues[current].push_back(std::move(work));
}

thread_local int depth = 0;
thread_local std::vector<std::function<void()>> done;

// Does what is queued in a stream, or only what is until something has happened.
void drain(c10::StreamId stream, const bool *happened = nullptr) {
  std::vector<std::function<void()>> ended; // outlive the lock: tensors may need Python's lock to end
  std::lock_guard<std::recursive_mutex> locked(running);
  at::NoGradGuard no_grad;
  auto &works = queues[stream];
  depth++;
  while (!works.empty() && (happened == nullptr || !*happened)) {
    done.push_back(std::move(works.front()));
    works.pop_front();
    auto work = done.back();
    work();
  }
  if (--depth == 0) ended.swap(done);
}

struct Event {
  c10::StreamId stream;
  std::shared_ptr<bool> happened;
  void wait() const { drain(stream, happened.get()); }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++newest); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current);
    current = next.id();
    return before;
  }
  bool queryStream(const c10::Stream &stream) const override {
    std::lock_guard<std::recursive_mutex> locked(running);
    return queues[stream.id()].empty();
  }
  void synchronizeStream(const c10::Stream &stream) const override { drain(stream.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (c10::StreamId id = 0; id <= newest; id++) drain(id);
  }
  void record(void **event, const c10::Stream &stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> locked(running);
    auto happened = std::make_shared<bool>(false);
    delete static_cast<Event *>(*event);
    *event = new Event{stream.id(), happened};
    queues[stream.id()].push_back([happened] { *happened = true; });
  }
  void block(void *event, const c10::Stream &stream) const override {
    std::lock_guard<std::recursive_mutex> locked(running);
    if (event != nullptr) queues[stream.id()].push_back([e = *static_cast<Event *>(event)] { e.wait(); });
  }
  bool queryEvent(void *event) const override {
    std::lock_guard<std::recursive_mutex> locked(running);
    return event == nullptr || *static_cast<Event *>(event)->happened;
  }
  void synchronizeEvent(void *event) const override {
    if (event != nullptr) static_cast<Event *>(event)->wait();
  }
  void destroyEvent(void *event, c10::DeviceIndex) const noexcept override { delete static_cast<Event *>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Kernels

// The tensor as a CPU's kernel sees it: the same memory.
at::Tensor as_host(const at::Tensor &tensor) {
  if (tensor.is_cpu()) return tensor;
  auto seen = at::from_blob(of_kernels(tensor.data_ptr()), tensor.sizes(), tensor.strides(),
                            at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.is_conj()) seen._set_conj(true);
  if (tensor.is_neg()) seen._set_neg(true);
  return seen;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::ScalarType::Float));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::ScalarType::Float), format);
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking) {
  bool pageable = (from.is_cpu() && !is_pinned(from.data_ptr())) || (to.is_cpu() && !is_pinned(to.data_ptr()));
  bool on_device = !from.is_cpu() && !to.is_cpu();
  at::Tensor through = to;    // the bytes that cross the bus lie side by side
  if (from.is_cpu() && !to.is_contiguous()) through = at::empty_like(to, at::MemoryFormat::Contiguous);
  later([from, through] { as_host(through).copy_(as_host(from)); });
  if (!on_device && (pageable || !non_blocking)) drain(current);
  if (!through.is_same(to)) later([through, to] { as_host(to).copy_(as_host(through)); });
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor &resize(const at::Tensor &self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto *impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Scalar local_scalar(const at::Tensor &self) {
  drain(current);
  return as_host(self).item();
}

void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  drain(current);
  at::native::cpu_fallback(op, stack);
}

}    // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_", TORCH_FN(at::native::set_cpu_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

// Conjugated and negated views are copied as they are: copy_from knows of them.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();
