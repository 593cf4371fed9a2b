#include "tensors.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace uniep::ops {
namespace {

std::string name_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Byte:
      return "torch.uint8";
    default:
      return "of type " + std::string(torch::headeronly::toString(type));
  }
}

template <class Sizes>
std::string text_of(const Sizes& sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += size < 0 ? "any" : std::to_string(size);
  }
  return text + "]";
}

std::string device_of(const Tensor& tensor) {
  if (tensor.is_cpu()) return "the CPU";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "a device that is neither CPU nor CUDA";
}

// The type by the shim's own numbers.
std::int32_t shim_type(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::Long:
      return aoti_torch_dtype_int64();
    case ScalarType::Byte:
      return aoti_torch_dtype_uint8();
    default:
      refuse("there is no empty tensor " + name_of(type));
  }
}

using CurrentStream = AOTITorchError (*)(std::int32_t, void**);

// Looks in libtorch_cuda, which a CPU build of PyTorch lacks. It is loaded, but not for all to see.
CurrentStream find_current_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
  return reinterpret_cast<CurrentStream>(found);
}

}  // namespace

void refuse(const std::string& sentence) { throw std::runtime_error(sentence); }

void require(const Tensor& tensor, const char* name, ScalarType type,
             std::initializer_list<std::int64_t> shape, const Tensor& beside) {
  if (tensor.scalar_type() != type) {
    refuse(std::string(name) + " is " + name_of(tensor.scalar_type()) + "; it must be " +
           name_of(type));
  }
  const auto sizes = tensor.sizes();
  const bool fits = std::equal(
      sizes.begin(), sizes.end(), shape.begin(), shape.end(),
      [](std::int64_t size, std::int64_t wanted) { return wanted < 0 || size == wanted; });
  if (!fits) {
    refuse(std::string(name) + " has shape " + text_of(sizes) + "; it must be " + text_of(shape));
  }
  if (!tensor.is_contiguous()) {
    refuse(std::string(name) + " is not contiguous; pass " + name + ".contiguous()");
  }
  if (tensor.is_cuda() != beside.is_cuda() ||
      (tensor.is_cuda() && tensor.get_device_index() != beside.get_device_index())) {
    refuse(std::string(name) + " is on " + device_of(tensor) + "; the workspace is on " +
           device_of(beside) + ", and all tensors must be there");
  }
}

Tensor empty(const Tensor& beside, ScalarType type, std::initializer_list<std::int64_t> shape) {
  // Not by the dispatcher, which looks the op up by its name at every call.
  std::array<std::int64_t, 3> strides{};
  std::int64_t count = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = count;
    count *= std::max<std::int64_t>(shape.begin()[i], 1);
  }
  std::int32_t device = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(beside.get(), &device));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<std::int64_t>(shape.size()), shape.begin(), strides.data(), shim_type(type),
      device, beside.get_device_index(), &made));
  return Tensor(made);
}

void align(Tensor& tensor) {
  constexpr std::uintptr_t kAlignment = 16;  // as src/cuda/tensor_alignment.cpp has it
  if (!tensor.is_cuda()) return;
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  if (address % kAlignment != 0) tensor = torch::stable::clone(tensor);
}

void align(std::optional<Tensor>& tensor) {
  if (tensor) align(*tensor);
}

void raise_to(Tensor& into, const Tensor& values) {
  if (into.is_cpu()) {
    auto* own = static_cast<std::int64_t*>(into.mutable_data_ptr());
    const auto* others = static_cast<const std::int64_t*>(values.const_data_ptr());
    for (int i = 0; i < 2; ++i) own[i] = std::max(own[i], others[i]);
    return;
  }
  std::array<StableIValue, 3> stack{torch::stable::detail::from(into),
                                    torch::stable::detail::from(values),
                                    torch::stable::detail::from(into)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::maximum", "out", stack.data(), TORCH_ABI_VERSION));
  // Takes over what the call returned, which is `into`.
  into = torch::stable::detail::to<Tensor>(stack[0]);
}

std::int64_t number_in(const Tensor& tensor) {
  if (tensor.is_cpu()) return *static_cast<const std::int64_t*>(tensor.const_data_ptr());
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const Tensor copy = torch::stable::to(tensor, std::nullopt, std::nullopt, cpu);
  return *static_cast<const std::int64_t*>(copy.const_data_ptr());
}

void* current_stream(const Tensor& tensor) {
  if (!tensor.is_cuda()) return nullptr;
  static const CurrentStream current = find_current_stream();
  if (!current) refuse("this build of PyTorch has no CUDA; install one that has");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(current(tensor.get_device_index(), &stream));
  return stream;
}

}  // namespace uniep::ops
