// Streams, events, memory and statistics of the simulated accelerator.
//
// A stream is a worker thread that runs what is submitted to it in order. Device memory is host
// memory that is freed in stream order, as CUDA's caching allocator does it: the block is reusable
// by its own stream at once and by no other stream, and its bytes are overwritten with 0xFF when
// the stream reaches the free. Whoever reads it without an event or `record_stream` reads wrong
// bytes on any machine.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace sim {

constexpr int kDevices = 2;
constexpr int kStreamsPerDevice = 33; // The default stream and a pool of 32, as CUDA's.

using Clock = std::chrono::steady_clock;

// One recording of an event: signalled once by the stream that reaches it.
class Signal {
 public:
  void set();
  void wait();
  bool query();
  Clock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Clock::time_point time_;
};
using SignalPtr = std::shared_ptr<Signal>;

class Stream {
 public:
  Stream(int device, int64_t id);
  void submit(std::function<void()> task, bool is_work = true);
  // Sleeps for a random time of at most twice the mean; called on the worker thread.
  void delay(int64_t mean_us);
  SignalPtr record();
  void wait(const SignalPtr& signal);
  void synchronize();
  bool query();

  const int device;
  const int64_t id;

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::pair<std::function<void()>, bool>> tasks_; // The task, and whether it is work.
  int64_t unfinished_ = 0;
  std::mt19937_64 random_;
  int64_t seeded_ = -1;
};

int current_device();
int exchange_device(int device);
Stream& stream_at(int device, int64_t id);
Stream& current_stream(int device);
c10::Stream as_c10(const Stream& stream);
void synchronize_device(int device);

// Settings of the simulation.
struct Settings {
  std::atomic<int64_t> kernel_us{0}; // Mean random delay of a kernel.
  std::atomic<int64_t> copy_us{0}; // Mean random delay of a copy between host and device.
  std::atomic<int64_t> seed{0};
  std::atomic<int64_t> pinned_limit{-1}; // Bytes of host memory that may be pinned; -1: no limit.
};
Settings& settings();

// Counts by name, kept for each calling thread.
void count(const std::string& what);
std::map<std::pair<int64_t, std::string>, int64_t> counts(bool reset);

// Errors of kernels are raised by the next call, as CUDA does.
void set_error(const std::string& text);
void check_error();

// Device memory.
c10::DeviceAllocator* device_allocator();
void record_stream(const c10::DataPtr& data, Stream& stream);
void set_memory_limit(int device, int64_t nbytes);

// Pinned host memory.
bool is_pinned(const void* address);
void use_pinned(const c10::DataPtr& data, Stream& stream);
int host_register(void* address, size_t nbytes);
int host_unregister(void* address);
int64_t pinned_bytes();

// Gives a storage other memory of a size, with as many bytes as both have in common.
void resize_storage(const c10::Storage& storage, size_t nbytes);

} // namespace sim
