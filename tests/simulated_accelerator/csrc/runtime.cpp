#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <vector>

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// ---------------------------------------------------------------- settings, counts and errors

Settings& settings() {
  static Settings instance;
  return instance;
}

static std::mutex counts_mutex;
static std::map<std::pair<int64_t, std::string>, int64_t> counts_by_thread;

void count(const std::string& what) {
  static thread_local const int64_t thread = syscall(SYS_gettid);
  std::lock_guard<std::mutex> guard(counts_mutex);
  ++counts_by_thread[{thread, what}];
}

std::map<std::pair<int64_t, std::string>, int64_t> counts(bool reset) {
  std::lock_guard<std::mutex> guard(counts_mutex);
  auto result = counts_by_thread;
  if (reset) counts_by_thread.clear();
  return result;
}

static std::mutex error_mutex;
static std::string error_text;

void set_error(const std::string& text) {
  std::lock_guard<std::mutex> guard(error_mutex);
  if (error_text.empty()) error_text = text;
}

void check_error() {
  std::string text;
  {
    std::lock_guard<std::mutex> guard(error_mutex);
    text.swap(error_text);
  }
  TORCH_CHECK(text.empty(), "simulated accelerator: an earlier kernel failed: ", text);
}

// ---------------------------------------------------------------- streams and events

void Signal::set() {
  std::lock_guard<std::mutex> guard(mutex_);
  done_ = true;
  time_ = Clock::now();
  changed_.notify_all();
}

void Signal::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

bool Signal::query() {
  std::lock_guard<std::mutex> guard(mutex_);
  return done_;
}

Clock::time_point Signal::time() {
  std::lock_guard<std::mutex> guard(mutex_);
  return time_;
}

Stream::Stream(int device, int64_t id) : device(device), id(id) {
  std::thread([this] { run(); }).detach();
}

void Stream::submit(std::function<void()> task, bool is_work) {
  std::lock_guard<std::mutex> guard(mutex_);
  tasks_.push_back({std::move(task), is_work});
  unfinished_ += is_work;
  arrived_.notify_one();
}

void Stream::run() {
  for (;;) {
    std::pair<std::function<void()>, bool> next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      arrived_.wait(lock, [this] { return !tasks_.empty(); });
      next = std::move(tasks_.front());
      tasks_.pop_front();
    }
    try {
      next.first();
    } catch (const c10::Error& error) {
      set_error(error.what_without_backtrace());
    } catch (const std::exception& error) {
      set_error(error.what());
    }
    next.first = nullptr;
    std::lock_guard<std::mutex> guard(mutex_);
    unfinished_ -= next.second;
  }
}

void Stream::delay(int64_t mean_us) {
  if (mean_us <= 0) return;
  const int64_t seed = settings().seed.load();
  if (seed != seeded_) {
    random_.seed(static_cast<uint64_t>(seed) * 7919 + device * 1009 + id);
    seeded_ = seed;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % (2 * mean_us + 1)));
}

SignalPtr Stream::record() {
  auto signal = std::make_shared<Signal>();
  // No work: whoever has waited for the signal finds the stream idle.
  submit([signal] { signal->set(); }, /*is_work=*/false);
  return signal;
}

void Stream::wait(const SignalPtr& signal) {
  submit([signal] { signal->wait(); });
}

void Stream::synchronize() {
  record()->wait();
}

bool Stream::query() {
  std::lock_guard<std::mutex> guard(mutex_);
  return unfinished_ == 0;
}

static std::mutex streams_mutex;
static Stream* streams[kDevices][kStreamsPerDevice]; // Never destroyed: their threads use them.
static std::atomic<int64_t> next_stream[kDevices];
static thread_local int device_of_thread = 0;
static thread_local int64_t stream_of_thread[kDevices];

int current_device() {
  return device_of_thread;
}

int exchange_device(int device) {
  if (device < 0) return device_of_thread;
  TORCH_CHECK(device < kDevices, "simulated accelerator: there is no device ", device);
  return std::exchange(device_of_thread, device);
}

Stream& stream_at(int device, int64_t id) {
  std::lock_guard<std::mutex> guard(streams_mutex);
  TORCH_CHECK(device >= 0 && device < kDevices && id >= 0 && id < kStreamsPerDevice,
              "simulated accelerator: there is no stream ", id, " on device ", device);
  Stream*& stream = streams[device][id];
  if (stream == nullptr) stream = new Stream(device, id);
  return *stream;
}

Stream& current_stream(int device) {
  return stream_at(device, stream_of_thread[device]);
}

c10::Stream as_c10(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, stream.device), stream.id);
}

static Stream& from_c10(const c10::Stream& stream) {
  return stream_at(stream.device_index(), stream.id());
}

void synchronize_device(int device) {
  std::vector<SignalPtr> signals;
  for (int64_t id = 0; id < kStreamsPerDevice; ++id) {
    Stream* stream;
    {
      std::lock_guard<std::mutex> guard(streams_mutex);
      stream = streams[device][id];
    }
    if (stream != nullptr) signals.push_back(stream->record());
  }
  for (const auto& signal : signals) signal->wait();
}

struct Event {
  SignalPtr signal;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kDevice, exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(kDevice, current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) device_of_thread = device.index();
  }
  static int index(c10::Device device) {
    return device.index() < 0 ? current_device() : device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return as_c10(current_stream(index(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_c10(stream_at(index(device), 0));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int i = index(device);
    return as_c10(stream_at(i, 1 + next_stream[i]++ % (kStreamsPerDevice - 1)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = stream.device_index();
    const auto before = as_c10(current_stream(device));
    stream_of_thread[device] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &from_c10(stream);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->signal = from_c10(stream).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    from_c10(stream).wait(static_cast<Event*>(event)->signal);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->signal->query();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override { return from_c10(stream).query(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count("sync:stream");
    from_c10(stream).synchronize();
    check_error();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    count("sync:event");
    static_cast<Event*>(event)->signal->wait();
    check_error();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count("sync:device");
    synchronize_device(device < 0 ? current_device() : device);
    check_error();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, from_c10(stream));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto *begin = static_cast<Event*>(first), *end = static_cast<Event*>(second);
    TORCH_CHECK(begin != nullptr && end != nullptr && begin->signal->query() &&
                    end->signal->query(),
                "Both events must be completed before calculating elapsed time.");
    const auto time = end->signal->time() - begin->signal->time();
    return std::chrono::duration<double, std::milli>(time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---------------------------------------------------------------- device memory

struct Block {
  void* address;
  size_t nbytes; // Rounded.
  int device;
  int64_t stream; // Current when it was allocated: its memory is reused there only.
  std::set<Stream*> other_streams; // Of record_stream.
};

static void free_block(void* context);

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const int device = current_device();
    const c10::Device where(kDevice, device);
    if (nbytes == 0) return {nullptr, nullptr, &free_block, where};
    const size_t rounded = (nbytes + 511) / 512 * 512;
    Stream& stream = current_stream(device);
    std::unique_lock<std::mutex> guard(mutex_);
    Pool& pool = pools_[device];
    free_where_streams_are_done(pool);
    auto& stats = pool.stats;
    if (stats.active_bytes[0].current + static_cast<int64_t>(rounded) > pool.limit &&
        !pool.pending.empty()) {
      guard.unlock(); // CUDA's allocator waits for the streams of what was freed, too.
      count("sync:memory");
      synchronize_device(device);
      guard.lock();
      free_where_streams_are_done(pool);
    }
    if (stats.active_bytes[0].current + static_cast<int64_t>(rounded) > pool.limit) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated accelerator out of memory. Tried to allocate ",
                       nbytes, " bytes on device ", device, ", which has ", pool.limit,
                       " bytes of which ", stats.active_bytes[0].current, " are in use.");
    }
    Block* block = nullptr;
    auto& free = pool.free[{stream.id, rounded}];
    if (!free.empty()) {
      block = free.back();
      free.pop_back();
    } else {
      void* address = nullptr;
      TORCH_CHECK(posix_memalign(&address, 512, rounded) == 0, "no host memory for ", rounded, " bytes");
      std::memset(address, 0xFF, rounded);
      block = new Block{address, rounded, device, stream.id, {}};
      stats.reserved_bytes[0].increase(rounded);
      ++stats.num_device_alloc;
    }
    stats.allocation[0].increase(1);
    stats.active[0].increase(1);
    stats.allocated_bytes[0].increase(rounded);
    stats.active_bytes[0].increase(rounded);
    stats.requested_bytes[0].increase(nbytes);
    return {block->address, block, &free_block, where};
  }

  void free(Block* block) {
    std::lock_guard<std::mutex> guard(mutex_);
    Pool& pool = pools_[block->device];
    pool.stats.allocation[0].decrease(1);
    pool.stats.allocated_bytes[0].decrease(block->nbytes);
    if (block->other_streams.empty()) {
      make_reusable(pool, block);
      return;
    }
    std::vector<SignalPtr> signals;
    for (Stream* stream : block->other_streams) signals.push_back(stream->record());
    block->other_streams.clear();
    pool.pending.push_back({block, std::move(signals)});
  }

  void record(Block* block, Stream& stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (stream.id != block->stream || stream.device != block->device)
      block->other_streams.insert(&stream);
  }

  bool initialized() override { return true; }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* dest, const void* src, size_t n) const override { std::memcpy(dest, src, n); }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; ++device) synchronize_device(device);
    std::lock_guard<std::mutex> guard(mutex_);
    for (Pool& pool : pools_) {
      free_where_streams_are_done(pool);
    }
    for (int device = 0; device < kDevices; ++device) synchronize_device(device);
    for (Pool& pool : pools_) {
      for (auto& [key, blocks] : pool.free) {
        for (Block* block : blocks) {
          pool.stats.reserved_bytes[0].decrease(block->nbytes);
          std::free(block->address);
          delete block;
        }
      }
      pool.free.clear();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, from_c10(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex_);
    free_where_streams_are_done(pools_[device]);
    return pools_[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex_);
    Pool& pool = pools_[device];
    free_where_streams_are_done(pool);
    return {pool.limit - pool.stats.active_bytes[0].current, pool.limit};
  }
  void set_limit(int device, int64_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    pools_[device].limit = nbytes < 0 ? kDefaultLimit : nbytes;
  }

 private:
  static constexpr int64_t kDefaultLimit = 16ll << 30;
  struct Pending {
    Block* block;
    std::vector<SignalPtr> signals;
  };
  struct Pool {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::map<std::pair<int64_t, size_t>, std::vector<Block*>> free; // By stream and size.
    std::vector<Pending> pending;
    int64_t limit = kDefaultLimit;
  };

  // The block's own stream may use it for what it launches from now on; no other stream may.
  void make_reusable(Pool& pool, Block* block) {
    pool.stats.active[0].decrease(1);
    pool.stats.active_bytes[0].decrease(block->nbytes);
    void* address = block->address;
    const size_t nbytes = block->nbytes;
    stream_at(block->device, block->stream).submit([address, nbytes] {
      std::memset(address, 0xFF, nbytes);
    });
    pool.free[{block->stream, block->nbytes}].push_back(block);
  }

  void free_where_streams_are_done(Pool& pool) {
    std::vector<Pending> still;
    for (Pending& pending : pool.pending) {
      bool done = true;
      for (const auto& signal : pending.signals) done = done && signal->query();
      if (done) make_reusable(pool, pending.block);
      else still.push_back(std::move(pending));
    }
    pool.pending = std::move(still);
  }

  template <class F>
  void reset(c10::DeviceIndex device, F&& f) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto& s = pools_[device].stats;
    for (auto* array : {&s.allocation, &s.active, &s.allocated_bytes, &s.reserved_bytes,
                        &s.active_bytes, &s.requested_bytes})
      for (auto& stat : *array) f(stat);
  }

  std::mutex mutex_;
  Pool pools_[kDevices];
};

// Leaked: tensors may be freed after the destructors of this library ran.
static DeviceMemory& device_memory() {
  static auto* instance = new DeviceMemory();
  return *instance;
}

static void free_block(void* context) {
  if (context != nullptr) device_memory().free(static_cast<Block*>(context));
}

c10::DeviceAllocator* device_allocator() {
  return &device_memory();
}

void record_stream(const c10::DataPtr& data, Stream& stream) {
  if (data.get() != nullptr && data.get_deleter() == &free_block)
    device_memory().record(static_cast<Block*>(data.get_context()), stream);
}

void set_memory_limit(int device, int64_t nbytes) {
  device_memory().set_limit(device, nbytes);
}

// ---------------------------------------------------------------- pinned host memory

struct HostBlock {
  void* address;
  size_t nbytes;
  std::map<Stream*, SignalPtr> uses; // The last copy of each stream.
};

static void free_host_block(void* context);

class HostMemory final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_host_block, at::DeviceType::CPU};
    size_t rounded = 512;
    while (rounded < nbytes) rounded *= 2;
    std::unique_lock<std::mutex> lock(mutex_);
    auto& cached = free_[rounded];
    for (size_t i = 0; i < cached.size(); ++i) {
      HostBlock* block = cached[i];
      bool done = true;
      for (const auto& [stream, signal] : block->uses) done = done && signal->query();
      if (!done) continue;
      block->uses.clear();
      cached.erase(cached.begin() + i);
      return {block->address, block, &free_host_block, at::DeviceType::CPU};
    }
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 4096, rounded) == 0, "no host memory for ", rounded, " bytes");
    if (register_locked(address, rounded) != 0) {
      std::free(address);
      TORCH_CHECK(false, "simulated accelerator: no more host memory can be pinned (", rounded, " bytes)");
    }
    auto* block = new HostBlock{address, rounded, {}};
    return {address, block, &free_host_block, at::DeviceType::CPU};
  }
  void free(HostBlock* block) {
    std::lock_guard<std::mutex> guard(mutex_);
    free_[block->nbytes].push_back(block);
  }
  bool record_event(void*, void* context, c10::Stream stream) override {
    std::lock_guard<std::mutex> guard(mutex_);
    Stream& used = from_c10(stream);
    static_cast<HostBlock*>(context)->uses[&used] = used.record();
    return true;
  }
  void empty_cache() override {
    for (int device = 0; device < kDevices; ++device) synchronize_device(device);
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& [size, blocks] : free_) {
      for (HostBlock* block : blocks) {
        ranges_.erase(block->address);
        pinned_ -= block->nbytes;
        std::free(block->address);
        delete block;
      }
    }
    free_.clear();
  }
  void copy_data(void* dest, const void* src, size_t n) const override { std::memcpy(dest, src, n); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  // Asked for by the generic code of pinned memory.
  c10::Stream get_current_stream() const { return as_c10(current_stream(current_device())); }

  int register_range(void* address, size_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    return register_locked(address, nbytes);
  }
  int unregister_range(void* address) {
    count("pinned:unregister");
    // As page locking may, the release waits for the device: whoever does it in a step loses time.
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = ranges_.find(address);
    if (found == ranges_.end()) return 1;
    pinned_ -= found->second;
    ranges_.erase(found);
    return 0;
  }
  bool contains(const void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto after = ranges_.upper_bound(const_cast<void*>(address));
    if (after == ranges_.begin()) return false;
    const auto& [begin, nbytes] = *std::prev(after);
    return static_cast<const char*>(address) < static_cast<const char*>(begin) + nbytes;
  }
  int64_t pinned() {
    std::lock_guard<std::mutex> guard(mutex_);
    return pinned_;
  }

 private:
  int register_locked(void* address, size_t nbytes) {
    count("pinned:register");
    const int64_t limit = settings().pinned_limit.load();
    if (limit >= 0 && pinned_ + static_cast<int64_t>(nbytes) > limit) return 2;
    ranges_[address] = nbytes;
    pinned_ += nbytes;
    return 0;
  }

  std::mutex mutex_;
  std::map<size_t, std::vector<HostBlock*>> free_;
  std::map<void*, size_t> ranges_;
  int64_t pinned_ = 0;
};

static HostMemory& host_memory() {
  static auto* instance = new HostMemory();
  return *instance;
}

static void free_host_block(void* context) {
  if (context != nullptr) host_memory().free(static_cast<HostBlock*>(context));
}

bool is_pinned(const void* address) {
  return host_memory().contains(address);
}

void use_pinned(const c10::DataPtr& data, Stream& stream) {
  if (data.get_deleter() == &free_host_block && data.get_context() != nullptr)
    host_memory().record_event(data.get(), data.get_context(), as_c10(stream));
}

int host_register(void* address, size_t nbytes) {
  return host_memory().register_range(address, nbytes);
}

int host_unregister(void* address) {
  return host_memory().unregister_range(address);
}

int64_t pinned_bytes() {
  return host_memory().pinned();
}

// ---------------------------------------------------------------- what PyTorch asks of a device

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  // Random operators draw from the CPU's generator, so that runs compare bit for bit with the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return at::Device(kDevice, current_device());
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kDevice, &device_memory());
  at::setHostAllocator(kDevice, &host_memory());
  return true;
}();

} // namespace sim
