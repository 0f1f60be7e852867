// Operators of the simulated accelerator: each is the CPU's own kernel, launched on the worker
// thread of a stream over raw pointers, which keep nothing alive.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstring>

namespace sim {
using at::Tensor;
using c10::IValue;

static bool on_device(const Tensor& t) {
  return t.defined() && t.device().is_privateuseone();
}

// The body runs on the stream's thread after a random delay; what it captured keeps nothing alive.
template <class F>
static void launch(Stream& stream, int64_t mean_us, F&& body) {
  auto task = std::make_shared<std::decay_t<F>>(std::forward<F>(body));
  stream.submit([task, mean_us, &stream]() {
    static thread_local const bool ready = (at::init_num_threads(), true);
    (void)ready;
    stream.delay(mean_us);
    at::NoGradGuard no_grad;
    (*task)();
  });
}

static Stream& stream_of(const Tensor& t) {
  return current_stream(t.device().index());
}

static void wait_for(Stream& stream, const std::string& why) {
  count("sync:" + why);
  stream.synchronize();
  check_error();
}

// A CPU tensor over the same bytes, which owns nothing.
static Tensor raw_view(const Tensor& t) {
  const auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), options);
}

static Tensor host_view(const Tensor& t) {
  return on_device(t) ? raw_view(t) : t;
}

// What stands for a tensor while the shapes of results are found.
static Tensor stand_in(const Tensor& t, at::Device device) {
  if (!t.defined() || (t.is_cpu() && t.dim() == 0)) return t;
  const auto options = at::TensorOptions().dtype(t.dtype()).device(device);
  if (device.is_meta()) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::zeros(t.sizes(), options);
}

template <class F>
static IValue map_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) return IValue(f(value.toTensor()));
  if (value.isTensorList()) {
    c10::List<Tensor> result;
    for (const Tensor& t : value.toTensorVector()) result.push_back(f(t));
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> result;
    for (const auto& t : value.toOptionalTensorVector())
      result.push_back(t.has_value() ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return result;
  }
  return value;
}

static IValue on_other_device(const IValue& value, at::Device device) {
  if (value.isDevice()) return IValue(device);
  if (value.isGenerator() && !value.toGenerator().defined()) return IValue();
  return value;
}

static bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// One call of an operator whose tensors are on one simulated device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), name_(c10::toString(schema_.operator_name())),
        stack_(stack), n_(schema_.arguments().size()),
        arguments_(stack->end() - n_, stack->end()), guard_(device()) {
    for (const auto& returned : schema_.returns()) {
      const auto kind = returned.type()->kind();
      if (kind != c10::TypeKind::ListType && kind != c10::TypeKind::TensorType)
        tensors_only_ = false;
      TORCH_CHECK(!returned.alias_info() || returned.alias_info()->isWrite(),
                  "simulated accelerator: the view operator ", name_, " is not implemented");
      if (!writes(returned)) returns_new_ = true;
    }
  }

  void run() {
    if (results_known_at_launch()) run_asynchronously();
    else run_synchronously();
    torch::jit::drop(*stack_, n_);
    for (auto& result : results_) stack_->push_back(std::move(result));
  }

 private:
  // The device of the first tensor that is on one, else the one that an argument names.
  at::Device device() {
    std::optional<at::Device> found;
    for (const auto& argument : arguments_) {
      map_tensors(argument, [&](const Tensor& t) {
        if (on_device(t)) {
          TORCH_CHECK(!found || *found == t.device(), name_,
                      ": expected all tensors to be on the same device, but found at least two: ",
                      *found, " and ", t.device());
          found = t.device();
        }
        return t;
      });
    }
    for (const auto& argument : arguments_)
      if (!found && argument.isDevice() && argument.toDevice().is_privateuseone())
        found = argument.toDevice();
    if (!found || found->index() < 0) return at::Device(at::kPrivateUse1, current_device());
    return *found;
  }

  Stream& stream() { return current_stream(guard_.current_device().index()); }

  bool results_known_at_launch() {
    const bool random = op_.hasTag(at::Tag::nondeterministic_seeded);
    if (random || !tensors_only_ || op_.hasTag(at::Tag::data_dependent_output)) return false;
    bool dynamic = op_.hasTag(at::Tag::dynamic_output_shape);
    for (size_t i = 0; i < n_; ++i) {
      if (arguments_[i].isOptionalTensorList()) { // A mask as an index has a shape of its own.
        for (const auto& t : arguments_[i].toOptionalTensorVector())
          dynamic = dynamic || (t && t->defined() &&
                                (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte));
      }
      if (schema_.arguments()[i].is_out() && arguments_[i].isTensor() &&
          arguments_[i].toTensor().defined() && arguments_[i].toTensor().numel() == 0)
        out_without_size_ = true;
    }
    if (!returns_new_ && !out_without_size_) return true;
    // Statistics of norms have other dtypes in the Meta kernels than on the CPU.
    const bool norm = name_.find("_norm") != std::string::npos;
    if (!norm && op_.hasKernelForDispatchKey(c10::DispatchKey::Meta) &&
        try_shapes(at::Device(at::kMeta), c10::DispatchKey::Meta))
      return true;
    return !dynamic && try_shapes(at::Device(at::kCPU), c10::DispatchKey::CPU);
  }

  bool try_shapes(at::Device device, c10::DispatchKey key) {
    torch::jit::Stack trial;
    for (const auto& argument : arguments_)
      trial.push_back(on_other_device(
          map_tensors(argument, [&](const Tensor& t) { return stand_in(t, device); }), device));
    shaped_arguments_.assign(trial.begin(), trial.end());
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(key), &trial);
    } catch (const std::exception&) {
      return false;
    }
    shaped_results_.assign(trial.begin(), trial.end());
    return true;
  }

  torch::jit::Stack host_arguments(bool asynchronous) {
    torch::jit::Stack result;
    for (const auto& argument : arguments_) {
      auto host = map_tensors(argument, [&](const Tensor& t) {
        if (on_device(t)) return raw_view(t);
        return t.defined() && asynchronous ? t.clone() : t; // Scalars are read at launch.
      });
      if (argument.isTensor() && argument.toTensor().defined() &&
          argument.toTensor().unsafeGetTensorImpl()->is_wrapped_number())
        host.toTensor().unsafeGetTensorImpl()->set_wrapped_number(true);
      result.push_back(on_other_device(host, at::Device(at::kCPU)));
    }
    return result;
  }

  IValue written_argument(const c10::Argument& returned) {
    for (size_t i = 0; i < n_; ++i)
      if (writes(schema_.arguments()[i]) &&
          *schema_.arguments()[i].alias_info() == *returned.alias_info())
        return arguments_[i];
    TORCH_CHECK(false, "simulated accelerator: no argument is returned by ", name_);
  }

  Tensor new_like(const Tensor& t) {
    return at::empty_strided(t.sizes(), t.strides(),
                             at::TensorOptions().dtype(t.dtype()).device(guard_.current_device()));
  }

  void run_synchronously() {
    wait_for(stream(), name_);
    auto call = host_arguments(false);
    const auto views = call;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call);
    for (size_t k = 0; k < schema_.returns().size(); ++k) {
      if (writes(schema_.returns()[k])) {
        results_.push_back(written_argument(schema_.returns()[k]));
        continue;
      }
      results_.push_back(map_tensors(call[k], [&](const Tensor& t) {
        if (!t.defined()) return t;
        Tensor result = new_like(t);
        store(result, t);
        return result;
      }));
    }
    for (size_t i = 0; i < n_; ++i) { // An out= argument that the kernel gave another shape.
      if (!out_without_size_ || !schema_.arguments()[i].is_out() || !arguments_[i].isTensor())
        continue;
      const Tensor& out = arguments_[i].toTensor();
      const Tensor& view = views[i].toTensor();
      if (!on_device(out) || out.sizes() == view.sizes()) continue;
      out.resize_(view.sizes());
      store(out, view);
    }
    stream().synchronize();
    check_error();
  }

  void store(const Tensor& to, const Tensor& from) {
    Tensor view = raw_view(to);
    launch(stream(), 0, [view, from]() { view.copy_(from); });
  }

  void run_asynchronously() {
    count("async:" + name_);
    if (out_without_size_) {
      for (size_t i = 0; i < n_; ++i) {
        if (!schema_.arguments()[i].is_out() || !arguments_[i].isTensor()) continue;
        const Tensor& out = arguments_[i].toTensor();
        const Tensor& after = shaped_arguments_[i].toTensor();
        if (out.defined() && out.sizes() != after.sizes()) out.resize_(after.sizes());
      }
    }
    auto call = host_arguments(true);
    std::vector<IValue> targets;
    for (size_t k = 0; k < schema_.returns().size(); ++k) {
      if (writes(schema_.returns()[k])) {
        results_.push_back(written_argument(schema_.returns()[k]));
        targets.emplace_back();
        continue;
      }
      results_.push_back(map_tensors(shaped_results_[k], [&](const Tensor& t) {
        return t.defined() ? new_like(t) : t;
      }));
      targets.push_back(map_tensors(results_.back(), host_view));
    }
    launch(stream(), settings().kernel_us.load(),
           [op = op_, call = std::move(call), targets = std::move(targets), name = name_]() mutable {
             auto store = [&](const Tensor& target, const Tensor& result) {
               if (!target.defined()) return;
               TORCH_CHECK(result.defined() && target.sizes() == result.sizes() &&
                               target.dtype() == result.dtype(),
                           name, ": the result was expected as ", target.sizes(), " of ",
                           target.dtype(), " and is ", result.sizes(), " of ", result.dtype());
               Tensor(target).copy_(result);
             };
             op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call);
             for (size_t k = 0; k < targets.size(); ++k) {
               if (targets[k].isTensor()) {
                 store(targets[k].toTensor(), call[k].toTensor());
               } else if (targets[k].isTensorList()) {
                 const auto to = targets[k].toTensorVector(), from = call[k].toTensorVector();
                 for (size_t j = 0; j < to.size(); ++j) store(to[j], from[j]);
               }
             }
           });
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack* stack_;
  const size_t n_;
  std::vector<IValue> arguments_;
  c10::DeviceGuard guard_;
  bool tensors_only_ = true, returns_new_ = false, out_without_size_ = false;
  std::vector<IValue> shaped_arguments_, shaped_results_, results_;
};

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_error();
  Call(op, stack).run();
}

// PyTorch offers devices these two, which do nothing on the CPU, in place of the two that do.
static void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(op, stack);
}

static void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  stack->insert(stack->end() - 7, IValue()); // The sizes of the bias, after the weight.
  fallback(op, stack);
}

static Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  check_error();
  if (dst.numel() == 0) return dst;
  const Tensor source = self.expand_as(dst);
  const bool both = on_device(self) && on_device(dst);
  const Tensor& host = on_device(self) ? dst : source;
  Stream& stream = stream_of(on_device(self) ? self : dst);
  const bool is_pinned_host = !both && is_pinned(host.const_data_ptr());
  // A copy from pageable memory is staged before it returns; one to it is over when it returns.
  const bool staged = !both && non_blocking && !is_pinned_host && on_device(dst);
  const bool wait = !both && !staged && !(non_blocking && is_pinned_host);
  const char* direction = both ? "copy DtoD" : on_device(dst) ? "copy HtoD" : "copy DtoH";
  if (wait) count(std::string("sync:") + direction);
  else count((staged ? "staged:" : "async:") + std::string(direction));
  Tensor from = staged ? source.clone() : raw_view(source);
  Tensor to = raw_view(dst);
  Stream* other = both && stream_of(dst).device != stream.device ? &stream_of(dst) : nullptr;
  if (other != nullptr) stream.wait(other->record());
  const auto mean_us = both ? settings().kernel_us.load() : settings().copy_us.load();
  launch(stream, mean_us, [from, to]() mutable {
    if (from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous())
      std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
    else
      to.copy_(from);
  });
  if (other != nullptr) other->wait(stream.record());
  if (is_pinned_host && !wait) use_pinned(host.storage().data_ptr(), stream);
  if (wait) {
    stream.synchronize();
    check_error();
  }
  return dst;
}

static Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

static at::Scalar local_scalar(const Tensor& self) {
  wait_for(stream_of(self), "aten::_local_scalar_dense");
  return at::native::_local_scalar_dense_cpu(raw_view(self));
}

static c10::DeviceGuard guard_for(std::optional<c10::Device> device) {
  if (device && device->has_index()) return c10::DeviceGuard(*device);
  return c10::DeviceGuard(c10::Device(at::kPrivateUse1, current_device()));
}

static Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                    std::optional<c10::Layout>, std::optional<c10::Device> device,
                    std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const auto guard = guard_for(device);
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                            std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                            std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const auto guard = guard_for(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

static Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__))
                            : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), start);
}

static Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

static Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size,
                            c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

static const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size,
                            std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const int64_t needed =
      (c10::multiply_integers(sizes) + self.storage_offset()) * self.element_size();
  if (needed > static_cast<int64_t>(self.storage().nbytes()))
    resize_storage(self.storage(), needed);
  return at::native::resize_(self, sizes, format);
}

static Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset,
                           c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

static void record_tensor_stream(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream_at(stream.device_index(), stream.id()));
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::DeviceGuard guard(impl->device());
  at::DataPtr fresh = device_allocator()->allocate(nbytes);
  const size_t kept = std::min(nbytes, impl->nbytes());
  if (kept > 0) {
    void *to = fresh.get(), *from = impl->mutable_data();
    launch(current_stream(impl->device().index()), 0,
           [to, from, kept]() { std::memcpy(to, from, kept); });
  }
  impl->set_data_ptr(std::move(fresh));
  impl->set_nbytes(nbytes);
}

// Runs a Python callable on the current stream of the current device, in its order.
static void launch_python(const pybind11::function& function) {
  auto held = std::make_shared<pybind11::object>(function);
  Stream& stream = current_stream(current_device());
  stream.submit([held]() mutable {
    pybind11::gil_scoped_acquire gil;
    try {
      (*held)();
    } catch (pybind11::error_already_set& error) {
      set_error(error.what());
    }
    *held = pybind11::object();
  });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_tensor_stream);
  // Composite operators that would be split into several kernels here and are one on the CPU.
  for (const char* name : {"native_layer_norm", "native_group_norm", "_foreach_norm.Scalar",
                           "_foreach_copy_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace sim

namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIM_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER_PRECISION)
  AT_FORALL_FP32(SIM_FP32)
}
} // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using release = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("init", [] { at::globalContext().lazyInitDevice(c10::DeviceType::PrivateUse1); });
  m.def("device_count", [] { return sim::kDevices; });
  m.def("current_device", &sim::current_device);
  m.def("exchange_device", &sim::exchange_device);
  m.def("set_delays", [](int64_t kernel_us, int64_t copy_us) {
    sim::settings().kernel_us = kernel_us;
    sim::settings().copy_us = copy_us;
  });
  m.def("set_pinned_limit", [](int64_t nbytes) { sim::settings().pinned_limit = nbytes; });
  m.def("set_seed", [](int64_t seed) { sim::settings().seed = seed; });
  m.def("set_memory_limit", &sim::set_memory_limit);
  m.def("check_error", &sim::check_error);
  m.def("host_register", [](int64_t address, int64_t nbytes) {
    return sim::host_register(reinterpret_cast<void*>(address), nbytes);
  }, release());
  m.def("host_unregister", [](int64_t address) {
    return sim::host_unregister(reinterpret_cast<void*>(address));
  }, release());
  m.def("pinned_bytes", &sim::pinned_bytes);
  m.def("counts", &sim::counts);
  m.def("sleep", [](int64_t us) {
    sim::current_stream(sim::current_device()).submit(
        [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  });
  m.def("launch_python", &sim::launch_python);
  m.def("synchronize_all", [] {
    for (int device = 0; device < sim::kDevices; ++device) sim::synchronize_device(device);
  }, release());
}
