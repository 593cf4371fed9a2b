#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace uniep::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// Throws std::runtime_error, which is a RuntimeError in Python, with this sentence.
[[noreturn]] void refuse(const std::string& sentence);

/// Refuses, in one sentence that begins with `name`, a tensor of another type, shape or device, and
/// one that is not contiguous. -1 in `shape` accepts any size.
void require(const Tensor& tensor, const char* name, ScalarType type,
             std::initializer_list<std::int64_t> shape, const Tensor& beside);

/// An uninitialised tensor of up to three dimensions where `beside` lies.
Tensor empty(const Tensor& beside, ScalarType type, std::initializer_list<std::int64_t> shape);

/// On a GPU, where kernels read what begins at a multiple of 16 bytes: puts a copy in the place of
/// a tensor that does not, such as a part of another. For what the caller computes, not for what it
/// owns: neither weights nor results.
void align(Tensor& tensor);
void align(std::optional<Tensor>& tensor);

/// Raises each of the two numbers of `into` to that of `values`, on the current stream.
void raise_to(Tensor& into, const Tensor& values);

/// The only number of an int64 tensor; of a GPU's it waits.
std::int64_t number_in(const Tensor& tensor);

/// The cudaStream_t that PyTorch uses on the tensor's device now; null on a CPU.
void* current_stream(const Tensor& tensor);

}  // namespace uniep::ops
