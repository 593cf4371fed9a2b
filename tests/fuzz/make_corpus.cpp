// make_corpus FOLDER: writes the files that fuzzing starts from.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "fuzz/small_layer.h"

namespace uniep::fuzz {
namespace {

void write(const std::filesystem::path& file, const std::vector<std::byte>& bytes) {
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
}

std::vector<std::byte> with_header(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::vector<std::byte> file(sizeof length + header.size() + data_bytes);
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + sizeof length, header.data(), header.size());
  return file;
}

void make_corpus(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  write(folder / "layer_i32", small_layer(false));
  write(folder / "layer_i64", small_layer(true));
  write(folder / "empty_object", with_header("{}", 0));
  write(folder / "metadata",
        with_header(R"({"__metadata__":{"format":"pt"},)"
                    R"("b":{"data_offsets":[4,12],"dtype":"F64","shape":[]},)"
                    R"("a":{"data_offsets":[0,4],"dtype":"I32","shape":[1,1]},)"
                    R"("n":{"data_offsets":[4,4],"dtype":"BF16","shape":[0,9]}})",
                    12));
  write(folder / "overlap", with_header(R"({"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},)"
                                        R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                                        12));
}

}  // namespace
}  // namespace uniep::fuzz

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_corpus FOLDER\n");
    return 2;
  }
  uniep::fuzz::make_corpus(argv[1]);
  return 0;
}
