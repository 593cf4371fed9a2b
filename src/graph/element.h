#pragma once

#include <cstdint>

#include "uniep/bf16.h"
#include "uniep/macros.h"

namespace uniep {

/// What a tensor consists of.
enum class Element : std::uint8_t { kByte, kBf16, kFp32, kUint32 };

constexpr const char* name(Element element) {
  switch (element) {
    case Element::kByte:
      return "byte";
    case Element::kBf16:
      return "bf16";
    case Element::kFp32:
      return "fp32";
    case Element::kUint32:
      return "uint32";
  }
  return "";
}

/// The C++ type of an element.
template <Element>
struct ElementOf;
template <>
struct ElementOf<Element::kByte> {
  using Type = std::uint8_t;
};
template <>
struct ElementOf<Element::kBf16> {
  using Type = bf16;
};
template <>
struct ElementOf<Element::kFp32> {
  using Type = float;
};
template <>
struct ElementOf<Element::kUint32> {
  using Type = std::uint32_t;
};

constexpr UNIEP_HD std::int64_t bytes_of(Element element) {
  switch (element) {
    case Element::kByte:
      return 1;
    case Element::kBf16:
      return sizeof(bf16);
    case Element::kFp32:
      return sizeof(float);
    case Element::kUint32:
      return sizeof(std::uint32_t);
  }
  return 0;
}

}  // namespace uniep
