// The layer check agrees with the reader on every file, and neither throws anything but Error(kIo).
// The bytes are tried as a file of their own and as changes to a valid small layer.
#include <cstdint>

#include "fuzz/fuzz_util.h"
#include "fuzz/small_layer.h"
#include "io/layer_file.h"

namespace uniep::fuzz {
namespace {

void check_layer_data(const LayerData& d) {
  const auto size = [](std::int64_t a, std::int64_t b, std::int64_t c = 1) {
    return static_cast<std::size_t>(a * b * c);
  };
  expect(d.x.size() == size(d.tokens, d.hidden), "x");
  expect(d.topk_ids.size() == size(d.tokens, d.topk), "topk_ids");
  expect(d.topk_probs.size() == size(d.tokens, d.topk), "topk_probs");
  expect(d.w1.size() == size(d.num_experts, 2 * d.intermediate, d.hidden), "w1");
  expect(d.w2.size() == size(d.num_experts, d.hidden, d.intermediate), "w2");
  expect(d.dy.empty() || d.dy.size() == d.x.size(), "dy");
  for (const std::int32_t id : d.topk_ids) expect(id >= -1 && id < d.num_experts, "ids");
}

void check(std::span<const std::byte> file) {
  const io::LayerCheck found = io::check_layer(file, "fuzz");
  for (const std::string& finding : found.findings) expect_one_line(finding);
  expect(found.findings.size() < 100, "findings are bounded");
  if (found.summary) io::to_string(*found.summary);
  try {
    check_layer_data(io::parse_layer(file, "fuzz"));
    expect(found.findings.empty() && found.summary, "what is accepted has no findings");
  } catch (const Error& error) {
    expect_readable(error);
    expect(!found.findings.empty(), "what is refused has findings");
  }
}

/// Reads (place, value) pairs and puts each value at its place: 2 bytes of place, 1 of value.
void patch(std::vector<std::byte>& file, std::span<const std::uint8_t> changes) {
  for (; changes.size() >= 3; changes = changes.subspan(3)) {
    const std::size_t place = changes[0] + 256u * changes[1];
    file[place % file.size()] = static_cast<std::byte>(changes[2]);
  }
}

}  // namespace
}  // namespace uniep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<std::byte> valid = uniep::fuzz::small_layer(true);
  uniep::fuzz::check(std::as_bytes(std::span(data, size)));
  std::vector<std::byte> changed = valid;
  uniep::fuzz::patch(changed, {data, size});
  uniep::fuzz::check(changed);
  return 0;
}
