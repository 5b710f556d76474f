// A device for tests of PyTorch, for machines without one: its memory cannot be touched by the host, and what its
// streams are told to copy they copy as late as they may.
//
// A tensor's address lies in pages that nobody may read or write; the same memory is mapped once more for the device's
// own kernels, which are those of the CPU. A copy that does not have to be waited for lies in the queue of its stream
// until that stream is waited for, or asked often enough, or does something else. Memory that is freed gets other
// elements as soon as the stream in which it was allocated comes there, or those that were recorded (record_stream). So
// these end as they would on a GPU on a bad day: an address of the device that is used on the host (SIGSEGV, or EFAULT
// in the kernel), host memory that is used again before it was copied, a copy on another stream than the one that it
// had to follow, memory that is freed while another stream still has to use it.
//
// OFFHOST_DEVICES in the environment: how many there are, else one. torch.ops.offhost.hold() has the current stream
// stop there until torch.ops.offhost.release().
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
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const int count = std::getenv("OFFHOST_DEVICES") ? std::atoi(std::getenv("OFFHOST_DEVICES")) : 1;
thread_local c10::DeviceIndex here = 0;

// Has a device be the thread's while it lives.
struct At {
  c10::DeviceIndex before = here;
  explicit At(c10::Device device) {
    if (device.has_index()) here = device.index();
  }
  ~At() { here = before; }
};

// Streams

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
struct Work {
  std::function<void()> run;
  std::shared_ptr<std::atomic<bool>> gate; // before which it waits
};

std::recursive_mutex running; // kernels run one after the other
std::map<StreamKey, std::deque<Work>> queues;
std::atomic<c10::StreamId> newest = 0;
std::vector<std::shared_ptr<std::atomic<bool>>> gates;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current;

StreamKey current_of(c10::DeviceIndex device) { return {device, current[device]}; }

void later(StreamKey stream, std::function<void()> work) {
  std::lock_guard<std::recursive_mutex> locked(running);
  queues[stream].push_back({std::move(work), nullptr});
}

thread_local int depth = 0;
thread_local std::vector<std::function<void()>> done;

// Does what is queued in a stream, or only what is until something has happened; if it only asks, up to a closed gate.
void drain(StreamKey stream, const bool *happened = nullptr, bool asks = false) {
  std::vector<std::function<void()>> ended; // outlive the lock: tensors may need Python's lock to end
  std::unique_lock<std::recursive_mutex> locked(running);
  at::NoGradGuard no_grad;
  auto &works = queues[stream];
  depth++;
  while (!works.empty() && (happened == nullptr || !*happened)) {
    if (works.front().gate != nullptr && !*works.front().gate) {
      if (asks) break;
      if (depth == 1) locked.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (depth == 1) locked.lock();
      continue;
    }
    done.push_back(std::move(works.front().run));
    works.pop_front();
    auto work = done.back();
    work();
  }
  if (--depth == 0) ended.swap(done);
}

struct Event {
  StreamKey stream;
  std::shared_ptr<bool> happened;
  std::shared_ptr<std::atomic<int>> asked = std::make_shared<std::atomic<int>>(0);

  static Event in(StreamKey stream) {
    Event event{stream, std::make_shared<bool>(false)};
    later(stream, [happened = event.happened] { *happened = true; });
    return event;
  }
  void wait() const { drain(stream, happened.get()); }
  // A device comes there at some time, also if nobody waits.
  bool query() const {
    std::lock_guard<std::recursive_mutex> locked(running);
    if (!*happened && ++*asked > 3) drain(stream, happened.get(), true);
    return *happened;
  }
};

// Memory

std::mutex memory;
struct Mapped {
  char *tensors, *kernels;
  size_t size;
  StreamKey made; // the stream in which it was allocated
  std::set<StreamKey> used; // others that were recorded
  ~Mapped() {
    munmap(kernels, size);
    munmap(tensors, size);
  }
};
std::map<char *, std::shared_ptr<Mapped>> mapped; // by the address that tensors have
std::map<char *, size_t> pinned;

std::shared_ptr<Mapped> mapping_of(const void *address) {
  auto at = static_cast<char *>(const_cast<void *>(address));
  std::lock_guard<std::mutex> locked(memory);
  auto found = mapped.upper_bound(at);
  TORCH_CHECK(found != mapped.begin(), "no memory of the device");
  --found;
  TORCH_CHECK(at <= found->first + found->second->size, "no memory of the device");
  return found->second;
}

char *of_kernels(const Mapped &mapping, const void *address) {
  return mapping.kernels + (static_cast<const char *>(address) - mapping.tensors);
}

// What is freed is another tensor's of the stream in which it was allocated, which writes into it next.
void unmap(void *address) {
  std::shared_ptr<Mapped> freed;
  {
    std::lock_guard<std::mutex> locked(memory);
    auto found = mapped.find(static_cast<char *>(address));
    freed = std::move(found->second);
    mapped.erase(found);
  }
  if (freed.use_count() == 1) return; // nothing that is queued uses it
  std::lock_guard<std::recursive_mutex> locked(running);
  std::vector<Event> uses;
  for (auto stream : freed->used) uses.push_back(Event::in(stream));
  later(freed->made, [freed, uses] {
    for (auto &use : uses) use.wait();
    memset(freed->kernels, 0xff, freed->size);
  });
}

void use(const void *address, StreamKey stream) {
  if (address == nullptr) return;
  auto mapping = mapping_of(address);
  std::lock_guard<std::mutex> locked(memory);
  if (stream != mapping->made) mapping->used.insert(stream);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kType, here);
    if (bytes == 0) return {nullptr, nullptr, [](void *) {}, device};
    size_t size = (bytes + 4095) / 4096 * 4096;
    int fd = memfd_create("offhost", 0);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0, "out of memory");
    void *tensors = mmap(nullptr, size, PROT_NONE, MAP_SHARED, fd, 0);
    void *kernels = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    TORCH_CHECK(tensors != MAP_FAILED && kernels != MAP_FAILED, "out of memory");
    auto at = static_cast<char *>(tensors);
    std::lock_guard<std::mutex> locked(memory);
    mapped[at].reset(new Mapped{at, static_cast<char *>(kernels), size, current_of(here), {}});
    return {tensors, tensors, unmap, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return unmap; }
  void copy_data(void *to, const void *from, std::size_t count) const override {
    memcpy(of_kernels(*mapping_of(to), to), of_kernels(*mapping_of(from), from), count);
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
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(count); }
  c10::DeviceIndex getCurrentDevice() const override { return here; }
  void setCurrentDevice(c10::DeviceIndex device) const override { here = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(here, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void *address) const override { return is_pinned(address); }
  c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
    At device(storage.device());
    auto larger = device_memory.allocate(bytes);
    size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) device_memory.copy_data(larger.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
Hooks hooks;

StreamKey key_of(const c10::Stream &stream) { return {stream.device_index(), stream.id()}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device.has_index() ? device.index() : here), id);
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kType, std::exchange(here, device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(kType, here); }
  void setDevice(c10::Device device) const override { here = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { here = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(count); }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current[device.has_index() ? device.index() : here]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, ++newest); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device(), std::exchange(current[next.device_index()], next.id()));
  }
  bool queryStream(const c10::Stream &stream) const override {
    std::lock_guard<std::recursive_mutex> locked(running);
    return queues[key_of(stream)].empty();
  }
  void synchronizeStream(const c10::Stream &stream) const override { drain(key_of(stream)); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (c10::StreamId id = 0; id <= newest; id++) drain({device, id});
  }
  void record(void **event, const c10::Stream &stream, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<Event *>(*event);
    *event = new Event(Event::in(key_of(stream)));
  }
  void block(void *event, const c10::Stream &stream) const override {
    if (event != nullptr) later(key_of(stream), [e = *static_cast<Event *>(event)] { e.wait(); });
  }
  bool queryEvent(void *event) const override { return event == nullptr || static_cast<Event *>(event)->query(); }
  void synchronizeEvent(void *event) const override {
    if (event != nullptr) static_cast<Event *>(event)->wait();
  }
  void destroyEvent(void *event, c10::DeviceIndex) const noexcept override { delete static_cast<Event *>(event); }
  void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
    use(data.get(), key_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Kernels

// The tensor as a CPU's kernel sees it: the same memory, which another tensor may get meanwhile.
at::Tensor as_host(const at::Tensor &tensor) {
  if (tensor.is_cpu()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.data_ptr() == nullptr) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto mapping = mapping_of(tensor.data_ptr());
  auto seen = at::from_blob(
      of_kernels(*mapping, tensor.data_ptr()), tensor.sizes(), tensor.strides(), [mapping](void *) {}, options);
  if (tensor.is_conj()) seen._set_conj(true);
  if (tensor.is_neg()) seen._set_neg(true);
  return seen;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  At where(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::ScalarType::Float));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  At where(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::ScalarType::Float), format);
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking) {
  bool pageable = (from.is_cpu() && !is_pinned(from.data_ptr())) || (to.is_cpu() && !is_pinned(to.data_ptr()));
  bool on_device = !from.is_cpu() && !to.is_cpu();
  at::Tensor through = to; // the bytes that cross the bus lie side by side
  if (from.is_cpu() && !to.is_contiguous()) through = at::empty_like(to, at::MemoryFormat::Contiguous);
  auto stream = current_of(to.is_cpu() ? from.device().index() : to.device().index());
  later(stream, [source = as_host(from), target = as_host(through)] { target.copy_(source); });
  if (!on_device && (pageable || !non_blocking)) drain(stream);
  if (!through.is_same(to)) {
    later(stream, [source = as_host(through), target = as_host(to)] { target.copy_(source); });
  }
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
  drain(current_of(self.device().index()));
  return as_host(self).item();
}

void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  for (int device = 0; device < count; device++) drain(current_of(static_cast<c10::DeviceIndex>(device)));
  at::native::cpu_fallback(op, stack);
}

void record_stream(at::Tensor &self, c10::Stream stream) { use(self.storage().data(), key_of(stream)); }

void hold() {
  std::lock_guard<std::recursive_mutex> locked(running);
  gates.push_back(std::make_shared<std::atomic<bool>>(false));
  queues[current_of(here)].push_back({[] {}, gates.back()});
}

void release() {
  std::lock_guard<std::recursive_mutex> locked(running);
  for (auto &gate : gates) *gate = true;
  gates.clear();
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("record_stream", TORCH_FN(record_stream));
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

TORCH_LIBRARY(offhost, m) {
  m.def("hold() -> ()", hold);
  m.def("release() -> ()", release);
}

// Conjugated and negated views are copied as they are: copy_from knows of them.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();
