#include "io/safetensors.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <fstream>
#include <limits>

#include "io/io_test_util.h"
#include "support/states.h"

namespace uniep::io {
namespace {

using std::filesystem::path;

std::string parse_error(const std::vector<std::byte>& file) {
  return io_sentence([&] { parse_safetensors(file, "f"); });
}

std::string header_error(const std::string& header, std::size_t data_bytes = 0) {
  return parse_error(raw_file(header, data_bytes));
}

/// A header with one tensor 'a' whose entry is given.
std::string entry_error(const std::string& entry, std::size_t data_bytes = 8) {
  return header_error("{\"a\":" + entry + "}", data_bytes);
}

std::string two_error(int begin_a, int end_a, int begin_b, int end_b, std::size_t data_bytes) {
  const auto entry = [](int begin, int end) {
    return "{\"dtype\":\"I32\",\"shape\":[" + std::to_string((end - begin) / 4) +
           "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  };
  return header_error("{\"a\":" + entry(begin_a, end_a) + ",\"b\":" + entry(begin_b, end_b) + "}",
                      data_bytes);
}

void write_bytes(const path& file, const std::vector<std::byte>& bytes) {
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
}

std::vector<std::byte> read_bytes(const path& file) {
  std::vector<std::byte> bytes(std::filesystem::file_size(file));
  std::ifstream in(file, std::ios::binary);
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

/// One tensor of each type, with the extremes of the type.
struct Samples {
  std::array<bf16, 3> b{bf16{0x3f80}, bf16{0x7f81}, bf16{0x8000}};
  std::array<float, 4> f{0.5f, -0.0f, std::numeric_limits<float>::infinity(), 1e-45f};
  std::array<double, 2> d{std::numeric_limits<double>::max(), -1};
  std::array<std::int32_t, 2> i{std::numeric_limits<std::int32_t>::min(), 7};
  std::array<std::int64_t, 1> l{std::numeric_limits<std::int64_t>::min()};

  std::vector<Tensor> tensors() const {
    return {make_tensor<bf16>("b", {3}, b),        make_tensor<float>("f", {2, 1, 2}, f),
            make_tensor<double>("d", {2}, d),      make_tensor<std::int32_t>("i", {1, 2}, i),
            make_tensor<std::int64_t>("l", {}, l), make_tensor<float>("none", {0, 5}, {})};
  }

  void expect_in(const TensorFile& file) const {
    ASSERT_EQ(file.tensors.size(), 6u);
    EXPECT_EQ(file.get("b").as<bf16>(), std::vector<bf16>(b.begin(), b.end()));
    EXPECT_EQ(file.get("f").as<float>(), std::vector<float>(f.begin(), f.end()));
    EXPECT_EQ(file.get("d").as<double>(), std::vector<double>(d.begin(), d.end()));
    EXPECT_EQ(file.get("i").as<std::int32_t>(), std::vector<std::int32_t>(i.begin(), i.end()));
    EXPECT_EQ(file.get("l").as<std::int64_t>(), std::vector<std::int64_t>(l.begin(), l.end()));
    EXPECT_EQ(file.get("f").shape, (std::vector<std::int64_t>{2, 1, 2}));
    EXPECT_TRUE(file.get("l").shape.empty());
    EXPECT_TRUE(file.get("none").as<float>().empty());
    EXPECT_EQ(file.tensors[0].name, "b");
    EXPECT_EQ(file.tensors[5].name, "none");
  }
};

TEST(Safetensors, RoundTripOfAllTypesInMemory) {
  const Samples samples;
  const auto bytes = serialize_safetensors(samples.tensors());
  samples.expect_in(parse_safetensors(bytes, "memory"));
}

TEST(Safetensors, RoundTripOfAllTypesThroughAFile) {
  const TemporaryFolder folder;
  const Samples samples;
  write_safetensors(folder / "a.safetensors", samples.tensors());
  samples.expect_in(read_safetensors(folder / "a.safetensors"));
  EXPECT_EQ(read_bytes(folder / "a.safetensors"), serialize_safetensors(samples.tensors()));
  EXPECT_EQ(folder.num_files(), 1u) << "the temporary file is gone";
}

TEST(Safetensors, ATensorFileCanBeMoved) {
  const TemporaryFolder folder;
  const Samples samples;
  write_safetensors(folder / "a", samples.tensors());
  TensorFile file = read_safetensors(folder / "a");
  const TensorFile moved = std::move(file);
  samples.expect_in(moved);
}

TEST(Safetensors, WritingIsDeterministicAndAligned) {
  const Samples samples;
  const auto once = serialize_safetensors(samples.tensors());
  EXPECT_EQ(once, serialize_safetensors(samples.tensors()));
  std::uint64_t length = 0;
  std::memcpy(&length, once.data(), sizeof length);
  EXPECT_EQ(length % 8, 0u);
  const std::array<float, 1> one{1};
  const auto simple = serialize_safetensors(std::vector{make_tensor<float>("x", {1}, one)});
  const std::string text(reinterpret_cast<const char*>(simple.data()) + 8, simple.size() - 12);
  EXPECT_EQ(text, R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  )");
}

TEST(Safetensors, ValuesNeedNoAlignment) {
  const std::string header = R"({"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},)"
                             R"("b":{"dtype":"F64","shape":[1],"data_offsets":[2,10]}})";
  auto file = raw_file(header, 10);
  const double value = 0.1;
  std::memcpy(file.data() + file.size() - 8, &value, 8);
  for (std::size_t shift = 0; shift < 8; ++shift) {
    std::vector<std::byte> buffer(shift);
    buffer.insert(buffer.end(), file.begin(), file.end());
    const auto parsed = parse_safetensors(std::span(buffer).subspan(shift), "shifted");
    EXPECT_EQ(parsed.get("b").as<double>()[0], value);
  }
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  EXPECT_TRUE(parse_safetensors(raw_file("{}", 0), "f").tensors.empty());
  EXPECT_TRUE(parse_safetensors(raw_file("{}   \n", 0), "f").tensors.empty());
  const std::string any_order = R"({"__metadata__":{"format":"pt","by":"someone"},)"
                                R"("late":{"data_offsets":[4,8],"shape":[1],"dtype":"I32"},)"
                                R"("early":{"shape":[1],"data_offsets":[0,4],"dtype":"I32"}})";
  const auto bytes = raw_file(any_order, 8);
  const auto file = parse_safetensors(bytes, "f");
  EXPECT_EQ(file.tensors[0].name, "late");
  EXPECT_EQ(file.get("early").bytes.data(), bytes.data() + bytes.size() - 8);
}

TEST(Safetensors, OtherTypeOrMissingTensor) {
  const Samples samples;
  const auto bytes = serialize_safetensors(samples.tensors());
  const auto file = parse_safetensors(bytes, "f");
  EXPECT_STATES(io_sentence([&] { file.get("b").as<float>(); }),
                "f: tensor 'b' has dtype BF16; F32 is needed");
  EXPECT_STATES(io_sentence([&] { file.get("w3"); }),
                "f: has no tensor 'w3'; it has 'b', 'f', 'd', 'i', 'l', 'none'");
  EXPECT_STATES(io_sentence([&] { parse_safetensors(raw_file("{}", 0), "f").get("x"); }),
                "f: has no tensor 'x'; it has none at all");
  EXPECT_EQ(file.find("w3"), nullptr);
}

TEST(SafetensorsErrors, FilesThatAreNone) {
  const TemporaryFolder folder;
  const auto read = [&](const path& p) { return io_sentence([&] { read_safetensors(p); }); };
  const std::string missing = (folder / "missing").string();
  EXPECT_STATES(read(missing), missing +
                                   ": cannot be opened: No such file or directory; the path of a "
                                   "readable file is needed");
  EXPECT_STATES(read(folder.path()),
                folder.path().string() + ": is a directory; a regular file is needed");
  EXPECT_STATES(read("/dev/null"), "/dev/null: is a device; a regular file is needed");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_STATES(read(folder / "pipe"),
                (folder / "pipe").string() + ": is a pipe; a regular file is needed");
  write_bytes(folder / "empty", {});
  EXPECT_STATES(read(folder / "empty"),
                (folder / "empty").string() + ": is empty; a safetensors file is needed");
  EXPECT_NE(read("").find("(empty path): cannot be opened"), std::string::npos);
  EXPECT_NE(read("a\nb").find("a?b: cannot be opened"), std::string::npos);
}

TEST(SafetensorsErrors, HeaderLength) {
  EXPECT_STATES(parse_error({}), "f: is empty; a safetensors file is needed");
  EXPECT_STATES(
      parse_error(std::vector<std::byte>(3)),
      "f: has only 3 bytes; a safetensors file, which starts with 8 bytes of header length, "
      "is needed");
  auto file = raw_file("{}", 0);
  file[0] = std::byte{3};
  EXPECT_STATES(
      parse_error(file),
      "f: the header length is 3, but only 2 bytes follow it; a file that was not cut short "
      "is needed");
  file.assign(16, std::byte{0xff});
  EXPECT_STATES(
      parse_error(file),
      "f: the header length is 18446744073709551615; up to 100000000 bytes are accepted (is "
      "it a safetensors file?)");
  const auto of_length = [](std::uint64_t length) {
    std::vector<std::byte> prefix(sizeof length);
    std::memcpy(prefix.data(), &length, sizeof length);
    return parse_error(prefix);
  };
  EXPECT_EQ(of_length(kMaxHeaderBytes + 1),
            "f: the header length is 100000001; up to 100000000 bytes are accepted (is it a "
            "safetensors file?)");
  EXPECT_EQ(of_length(kMaxHeaderBytes),
            "f: the header length is 100000000, but only 0 bytes follow it; a file that was not "
            "cut short is needed");
  EXPECT_STATES(header_error(""),
                "f: the header starts with ''; one JSON object, which starts with '{', is needed");
}

TEST(SafetensorsErrors, EveryTruncationIsReported) {
  const TemporaryFolder folder;
  const Samples samples;
  const auto whole = serialize_safetensors(samples.tensors());
  for (std::size_t n = 0; n < whole.size(); ++n) {
    const std::vector<std::byte> cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(n));
    EXPECT_FALSE(parse_error(cut).empty());
    if (n % 50 != 0) continue;
    write_bytes(folder / "cut", cut);
    EXPECT_FALSE(io_sentence([&] { read_safetensors(folder / "cut"); }).empty());
  }
}

TEST(SafetensorsErrors, EveryChangedHeaderByteIsReadOrReported) {
  const Samples samples;
  const auto whole = serialize_safetensors(samples.tensors());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    for (const char value : {'\0', '"', '-', '0', '9', '{', '[', '\xff'}) {
      auto changed = whole;
      changed[i] = static_cast<std::byte>(value);
      try {
        parse_safetensors(changed, "f");
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
      }
    }
  }
}

TEST(SafetensorsErrors, BadJson) {
  EXPECT_STATES(
      header_error("[]"),
      "f: the header starts with '[]'; one JSON object, which starts with '{', is needed");
  EXPECT_STATES(
      header_error("{\"a\":}"),
      "f: the header is not valid JSON at byte 6, near '\"a\":}'; one JSON object is needed");
  EXPECT_STATES(
      header_error("{} x"),
      "f: the header is not valid JSON at byte 4, near '{} x'; one JSON object is needed");
  EXPECT_STATES(header_error("{}{}"),
                "f: the header is not valid JSON at byte 3, near '{}{'; one JSON object is needed");
  EXPECT_STATES(header_error(std::string("{}\0{", 4)),
                "f: the header has a zero byte at byte 2; one JSON object, padded with spaces, is "
                "needed");
  EXPECT_NE(header_error("{\"\xff\":1}").find("near '\"\\xff'"), std::string::npos);
  EXPECT_NE(entry_error("1e999").find("not valid JSON"), std::string::npos);
}

TEST(SafetensorsErrors, DeepNestingIsRefusedAtItsFirstLevel) {
  const std::string deep(5'000'000, '[');
  EXPECT_STATES(
      entry_error(deep),
      "f: the entry of tensor 'a' is an array; an object with dtype, shape and data_offsets "
      "is needed");
  EXPECT_STATES(
      entry_error(R"({"shape":[[[[[)"),
      "f: the shape of tensor 'a' contains an array; integers from 0 to 9223372036854775807 "
      "are accepted");
  std::string objects;
  for (int i = 0; i < 1'000'000; ++i) objects += "{\"a\":";
  EXPECT_STATES(header_error(objects),
                "f: the entry of tensor 'a' has a field 'a'; dtype, shape and data_offsets are "
                "accepted");
}

TEST(SafetensorsErrors, Duplicates) {
  const std::string entry = R"({"dtype":"I32","shape":[0],"data_offsets":[0,0]})";
  EXPECT_STATES(header_error("{\"a\":" + entry + ",\"a\":" + entry + "}"),
                "f: the header has tensor 'a' twice; every name may occur once");
  EXPECT_STATES(entry_error(R"({"dtype":"I32","dtype":"I32"})"),
                "f: the entry of tensor 'a' has the field 'dtype' twice; once is accepted");
  EXPECT_STATES(header_error(R"({"__metadata__":{},"__metadata__":{}})"),
                "f: the header has __metadata__ twice; at most one is accepted");
}

TEST(SafetensorsErrors, Entries) {
  EXPECT_STATES(entry_error("7"),
                "f: the entry of tensor 'a' is 7; an object with dtype, shape and data_offsets is "
                "needed");
  EXPECT_STATES(entry_error("{}"), "f: the entry of tensor 'a' has no dtype; it is needed");
  EXPECT_STATES(entry_error(R"({"dtype":"I32"})"),
                "f: the entry of tensor 'a' has no shape; it is needed");
  EXPECT_STATES(entry_error(R"({"dtype":"I32","shape":[]})"),
                "f: the entry of tensor 'a' has no data_offsets; it is needed");
  EXPECT_STATES(
      entry_error(R"({"stride":1})"),
      "f: the entry of tensor 'a' has a field 'stride'; dtype, shape and data_offsets are "
      "accepted");
  EXPECT_STATES(header_error(R"({"__metadata__":{"k":1}})"),
                "f: __metadata__ is or contains 1; an object of strings is needed");
  EXPECT_STATES(header_error(R"({"__metadata__":null})"),
                "f: __metadata__ is or contains null; an object of strings is needed");
}

TEST(SafetensorsErrors, DTypes) {
  const std::string accepted =
      "; BF16, F32, F64, I32, I64, F16, BOOL, U8, I8, U16, I16, U32, U64, F8_E4M3 or F8_E5M2 is "
      "accepted";
  EXPECT_STATES(entry_error(R"({"dtype":"F4"})"), "f: the dtype of tensor 'a' is 'F4'" + accepted);
  EXPECT_STATES(entry_error(R"({"dtype":"bf16"})"),
                "f: the dtype of tensor 'a' is 'bf16'" + accepted);
  EXPECT_STATES(entry_error(R"({"dtype":32})"), "f: the dtype of tensor 'a' is 32" + accepted);
  EXPECT_STATES(entry_error(R"({"dtype":{}})"),
                "f: the dtype of tensor 'a' is an object" + accepted);
}

TEST(SafetensorsErrors, Shapes) {
  const std::string sizes = "; integers from 0 to 9223372036854775807 are accepted";
  const auto shape_error = [](const std::string& shape) {
    return entry_error(R"({"dtype":"I32","shape":)" + shape + R"(,"data_offsets":[0,8]})");
  };
  EXPECT_STATES(shape_error("8"), "f: the shape of tensor 'a' is 8; an array of sizes is needed");
  EXPECT_STATES(shape_error("[-2]"), "f: the shape of tensor 'a' contains -2" + sizes);
  EXPECT_STATES(shape_error("[2.0]"), "f: the shape of tensor 'a' contains '2.0'" + sizes);
  EXPECT_STATES(shape_error("[\"2\"]"), "f: the shape of tensor 'a' contains '2'" + sizes);
  EXPECT_STATES(shape_error("[true]"), "f: the shape of tensor 'a' contains true" + sizes);
  EXPECT_STATES(shape_error("[9223372036854775808]"),
                "f: the shape of tensor 'a' contains 9223372036854775808" + sizes);
  EXPECT_STATES(shape_error("[18446744073709551616]"),
                "f: the shape of tensor 'a' contains '18446744073709551616'" + sizes);
  EXPECT_STATES(shape_error("[1,1,1,1,1,1,1,1,2]"),
                "f: the shape of tensor 'a' has more than 8 dimensions; 0 to 8 are accepted");
  EXPECT_STATES(
      shape_error("[3]"),
      "f: tensor 'a' of shape [3] and dtype I32 needs 12 bytes, but its data_offsets [0, 8] "
      "are 8 bytes; both must agree");
  // Modulo 2^64, the first and the second of these are 0 bytes.
  for (const char* huge : {"[4611686018427387904]", "[4294967296,4294967296]",
                           "[9223372036854775807,9223372036854775807]"}) {
    EXPECT_NE(shape_error(huge).find("has more bytes than 63 bits can count; at most the 8 bytes"),
              std::string::npos)
        << huge;
  }
}

TEST(SafetensorsErrors, Offsets) {
  const auto offsets_error = [](const std::string& offsets) {
    return entry_error(R"({"dtype":"I32","shape":[2],"data_offsets":)" + offsets + "}");
  };
  const std::string range = "; 0 <= begin <= end <= 8, the bytes after the header, is accepted";
  EXPECT_STATES(offsets_error("8"),
                "f: the data_offsets of tensor 'a' are 8; an array [begin, end] is needed");
  EXPECT_STATES(offsets_error("[]"),
                "f: the data_offsets of tensor 'a' are 0 numbers; [begin, end] is needed");
  EXPECT_STATES(offsets_error("[0]"),
                "f: the data_offsets of tensor 'a' are 1 number; [begin, end] is needed");
  EXPECT_STATES(
      offsets_error("[0,8,8]"),
      "f: the data_offsets of tensor 'a' are more than 2 numbers; [begin, end] is needed");
  EXPECT_STATES(offsets_error("[-8,0]"),
                "f: the data_offsets of tensor 'a' contain -8; integers from 0 to 8 are accepted");
  EXPECT_STATES(offsets_error("[8,0]"), "f: the data_offsets of tensor 'a' are [8, 0]" + range);
  EXPECT_STATES(offsets_error("[0,9]"), "f: the data_offsets of tensor 'a' are [0, 9]" + range);
  EXPECT_EQ(
      offsets_error("[18446744073709551608,18446744073709551615]"),
      "f: the data_offsets of tensor 'a' are [18446744073709551608, 18446744073709551615]" + range);
}

TEST(SafetensorsErrors, OverlapsGapsAndTrailingBytes) {
  EXPECT_STATES(two_error(0, 8, 4, 12, 12),
                "f: tensor 'b' at bytes 4 to 12 overlaps tensor 'a', which ends at byte 8; tensors "
                "that follow one another are accepted");
  EXPECT_STATES(
      two_error(0, 8, 0, 8, 8),
      "f: tensor 'b' at bytes 0 to 8 overlaps tensor 'a', which ends at byte 8; tensors that "
      "follow one another are accepted");
  EXPECT_STATES(two_error(0, 4, 8, 12, 12),
                "f: bytes 4 to 8, before tensor 'b', belong to no tensor; tensors that follow one "
                "another are accepted");
  EXPECT_STATES(two_error(8, 12, 4, 8, 12),
                "f: bytes 0 to 4, before tensor 'b', belong to no tensor; tensors that follow one "
                "another are accepted");
  EXPECT_STATES(two_error(0, 4, 4, 8, 11),
                "f: the tensors end at byte 8 of the 11 bytes after the header; a file without "
                "trailing bytes is accepted");
  EXPECT_STATES(
      header_error("{}", 1),
      "f: the tensors end at byte 0 of the 1 bytes after the header; a file without trailing "
      "bytes is accepted");
}

TEST(SafetensorsErrors, NamesAreShownOnOneLineAndShortened) {
  EXPECT_STATES(header_error("{\"a\\nb\\u0000c\":1}"),
                "f: the entry of tensor 'a\\x0ab\\x00c' is 1; an object with dtype, shape and "
                "data_offsets is needed");
  EXPECT_LT(header_error("{\"" + std::string(100'000, 'n') + "\":1}").size(), 250u);
}

TEST(SafetensorsErrors, WhatCannotBeWritten) {
  const TemporaryFolder folder;
  const std::array<float, 2> two{1, 2};
  const auto refuse = [&](const std::vector<Tensor>& tensors) {
    EXPECT_EQ(
        sentence_of(ErrorCode::kInvalidArgument, [&] { write_safetensors(folder / "a", tensors); }),
        sentence_of(ErrorCode::kInvalidArgument, [&] { serialize_safetensors(tensors); }));
    return sentence_of(ErrorCode::kInvalidArgument, [&] { serialize_safetensors(tensors); });
  };
  const Tensor good = make_tensor<float>("a", {2}, two);
  EXPECT_EQ(refuse({good, good}), "two tensors are named 'a'; every name may occur once in a file");
  EXPECT_EQ(refuse({make_tensor<float>("a", {3}, two)}),
            "tensor 'a' of shape [3] and dtype F32 has 8 bytes, which its shape does not give");
  EXPECT_EQ(refuse({make_tensor<float>("__metadata__", {2}, two)}),
            "a tensor cannot be named '__metadata__'; the format keeps that name for itself");
  EXPECT_EQ(refuse({make_tensor<float>("\xff", {2}, two)}),
            "a tensor's name is not UTF-8; the format needs that");
  EXPECT_EQ(refuse({make_tensor<float>("a", {1, 1, 1, 1, 1, 1, 1, 1, 2}, two)}),
            "tensor 'a' has 9 dimensions; up to 8 are accepted");
  EXPECT_EQ(folder.num_files(), 0u);
}

TEST(SafetensorsErrors, PathsThatCannotBeWritten) {
  const TemporaryFolder folder;
  const auto write = [&](const path& p) {
    return io_sentence([&] { write_safetensors(p, Samples().tensors()); });
  };
  EXPECT_EQ(
      write(folder.path()),
      folder.path().string() + ": is a directory; the path of a new or regular file is needed");
  EXPECT_NE(write("/dev/full").find("/dev/full: "), std::string::npos);
  EXPECT_NE(write("/dev/full").find("No space left on device"), std::string::npos);
  EXPECT_NE(write(folder / "no/such/file").find("there is no folder"), std::string::npos);
  EXPECT_NE(write("").find("(empty path): "), std::string::npos);
}

/// Files cannot grow past `bytes` while this lives, as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
};

TEST(SafetensorsErrors, AWriteThatFailsHalfwayLeavesTheOldFile) {
  const TemporaryFolder folder;
  const path file = folder / "a";
  const Samples samples;
  write_safetensors(file, samples.tensors());
  const std::vector<float> large(100'000);
  std::string sentence;
  {
    const FileSizeLimit limit(4096);
    sentence = io_sentence([&] {
      write_safetensors(file, std::vector{make_tensor<float>("large", {100'000}, large)});
    });
  }
  EXPECT_EQ(sentence.find(file.string() + ": cannot be written past byte 4096: File too large"), 0u)
      << sentence;
  EXPECT_NE(sentence.find("kept"), std::string::npos) << sentence;
  samples.expect_in(read_safetensors(file));
  EXPECT_EQ(folder.num_files(), 1u) << "the temporary file is gone";
}

TEST(SafetensorsErrors, AFileLargerThanFreeMemoryIsRefusedBeforeItIsRead) {
  const TemporaryFolder folder;
  const std::string header =
      R"({"x":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}})";
  write_bytes(folder / "huge", raw_file(header, 0));
  std::filesystem::resize_file(folder / "huge", 8 + header.size() + (std::uintmax_t{4} << 40));
  EXPECT_NE(io_sentence([&] { read_safetensors(folder / "huge"); }).find("bytes of free memory"),
            std::string::npos);
}

TEST(SafetensorsErrors, AHugeSparseFileIsRefusedByItsHeader) {
  const TemporaryFolder folder;
  write_bytes(folder / "huge", raw_file("{}", 0));
  std::filesystem::resize_file(folder / "huge", std::uintmax_t{1} << 40);
  EXPECT_NE(
      io_sentence([&] { read_safetensors(folder / "huge"); }).find("the tensors end at byte 0"),
      std::string::npos);
}

}  // namespace
}  // namespace uniep::io
