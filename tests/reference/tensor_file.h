#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/layer_data.h"

namespace uniep::reference {

/// As much of the safetensors format as these tests need, so that the oracle's tests depend on
/// nothing but the oracle: 8 bytes of header size, the header (JSON), the data. Any malformed file
/// is an exception of the JSON library or std::vector::at.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    std::uint64_t header_size = 0;
    if (bytes.size() < sizeof header_size) throw std::runtime_error("cannot read " + path);
    std::memcpy(&header_size, bytes.data(), sizeof header_size);
    const auto data = bytes.begin() + 8 + static_cast<std::ptrdiff_t>(header_size);
    header_ = nlohmann::json::parse(bytes.begin() + 8, data);
    data_.assign(data, bytes.end());
  }

  std::int64_t size(const char* name, std::size_t dimension) const {
    return header_.at(name).at("shape").at(dimension);
  }

  template <class T>
  std::vector<T> tensor(const char* name) const {
    const auto& offsets = header_.at(name).at("data_offsets");
    const std::size_t begin = offsets.at(0);
    const std::size_t end = offsets.at(1);
    std::vector<T> values((end - begin) / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), &data_.at(begin), end - begin);
    return values;
  }

  LayerData layer() const {
    return {.tokens = size("x", 0),
            .hidden = size("x", 1),
            .intermediate = size("w2", 2),
            .num_experts = static_cast<int>(size("w1", 0)),
            .topk = static_cast<int>(size("topk_ids", 1)),
            .x = tensor<bf16>("x"),
            .topk_ids = tensor<std::int32_t>("topk_ids"),
            .topk_probs = tensor<float>("topk_probs"),
            .w1 = tensor<bf16>("w1"),
            .w2 = tensor<bf16>("w2"),
            .dy = tensor<bf16>("dy")};
  }

 private:
  nlohmann::json header_;
  std::vector<char> data_;
};

}  // namespace uniep::reference
