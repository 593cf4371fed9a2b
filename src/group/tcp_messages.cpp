#include "group/tcp_messages.h"

namespace uniep::tcp {

std::string pack(const Parts& parts) {
  std::string all;
  std::size_t bytes = 0;
  for (const std::string& p : parts) bytes += sizeof(std::uint64_t) + p.size();
  all.reserve(bytes);
  for (const std::string& p : parts) all += to_bytes<std::uint64_t>(p.size());
  for (const std::string& p : parts) all += p;
  return all;
}

Parts unpack(const std::string& all, int count) {
  Parts parts;
  std::size_t at = static_cast<std::size_t>(count) * sizeof(std::uint64_t);
  for (int r = 0; r < count; ++r) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, all.data() + static_cast<std::size_t>(r) * sizeof(bytes), sizeof(bytes));
    parts.push_back(all.substr(at, bytes));
    at += bytes;
  }
  return parts;
}

}  // namespace uniep::tcp
