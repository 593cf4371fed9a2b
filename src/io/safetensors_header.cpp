#include "io/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

#include "base/check.h"

namespace uniep::io {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kMetadataName = "__metadata__";

std::optional<DType> dtype_named(std::string_view name) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (to_string(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::string dtype_names() {
  std::string names;
  for (int i = 0; i < kNumDTypes; ++i) {
    const char* before = i == 0 ? "" : i + 1 < kNumDTypes ? ", " : " or ";
    names += cat(before, to_string(static_cast<DType>(i)));
  }
  return names;
}

/// Takes the JSON as a stream of events instead of a tree: what does not belong into a safetensors
/// header is refused where it starts, so that neither nesting nor size can exhaust anything.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(const std::string& file, std::uint64_t data_size)
      : file_(file), data_size_(data_size) {}

  std::vector<HeaderEntry> take_entries() { return std::move(entries_); }

  bool null() override { refuse("null"); }
  bool boolean(bool value) override { refuse(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { refuse(cat(value)); }
  bool number_float(number_float_t, const string_t& text) override { refuse(quote_name(text)); }
  bool number_unsigned(number_unsigned_t value) override;
  bool string(string_t& value) override;
  bool binary(binary_t&) override { refuse("binary data"); }
  bool start_object(std::size_t) override;
  bool key(string_t& name) override;
  bool end_object() override;
  bool start_array(std::size_t) override;
  bool end_array() override;
  bool parse_error(std::size_t position, const std::string& token,
                   const nlohmann::detail::exception&) override {
    fail("the header is not valid JSON at byte ", position, ", near ", quote_name(token),
         "; one JSON object is needed");
  }

 private:
  /// What the next event belongs to.
  enum class Expect {
    kHeader,
    kTensorName,
    kTensor,
    kField,
    kDType,
    kShape,
    kShapeItem,
    kOffsets,
    kOffsetItem,
    kMetadata,
    kMetadataKey,
    kMetadataValue
  };

  template <class... Args>
  [[noreturn]] void fail(const Args&... sentence) const {
    throw Error(ErrorCode::kIo, cat(file_, ": ", sentence...));
  }
  /// Fails because `found` is not what is expected here.
  [[noreturn]] void refuse(const std::string& found) const;

  std::string tensor() const { return cat("tensor ", quote_name(entry_.name)); }
  void start_tensor(const string_t& name);
  void start_field(const string_t& name);
  void finish_tensor();
  void finish_offsets();

  const std::string& file_;
  const std::uint64_t data_size_;
  Expect expect_ = Expect::kHeader;
  std::vector<HeaderEntry> entries_;
  std::unordered_set<std::string> names_;
  HeaderEntry entry_;
  std::vector<std::uint64_t> offsets_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  bool has_metadata_ = false;
};

void HeaderReader::refuse(const std::string& found) const {
  switch (expect_) {
    case Expect::kHeader:
    case Expect::kTensorName:
      fail("the header is ", found, "; one JSON object is needed");
    case Expect::kTensor:
    case Expect::kField:
      fail("the entry of ", tensor(), " is ", found,
           "; an object with dtype, shape and data_offsets is needed");
    case Expect::kDType:
      fail("the dtype of ", tensor(), " is ", found, "; ", dtype_names(), " is accepted");
    case Expect::kShape:
      fail("the shape of ", tensor(), " is ", found, "; an array of sizes is needed");
    case Expect::kShapeItem:
      fail("the shape of ", tensor(), " contains ", found, "; integers from 0 to ",
           std::numeric_limits<std::int64_t>::max(), " are accepted");
    case Expect::kOffsets:
      fail("the data_offsets of ", tensor(), " are ", found, "; an array [begin, end] is needed");
    case Expect::kOffsetItem:
      fail("the data_offsets of ", tensor(), " contain ", found, "; integers from 0 to ",
           data_size_, " are accepted");
    case Expect::kMetadata:
    case Expect::kMetadataKey:
    case Expect::kMetadataValue:
      fail("__metadata__ is or contains ", found, "; an object of strings is needed");
  }
  fail("the header is not understood");
}

bool HeaderReader::number_unsigned(number_unsigned_t value) {
  if (expect_ == Expect::kShapeItem) {
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max())) {
      refuse(cat(value));
    }
    if (entry_.shape.size() == kMaxRank) {
      fail("the shape of ", tensor(), " has more than ", kMaxRank, " dimensions; 0 to ", kMaxRank,
           " are accepted");
    }
    entry_.shape.push_back(static_cast<std::int64_t>(value));
    return true;
  }
  if (expect_ == Expect::kOffsetItem) {
    if (offsets_.size() == 2) {
      fail("the data_offsets of ", tensor(), " are more than 2 numbers; [begin, end] is needed");
    }
    offsets_.push_back(value);
    return true;
  }
  refuse(cat(value));
}

bool HeaderReader::string(string_t& value) {
  if (expect_ == Expect::kMetadataValue) {
    expect_ = Expect::kMetadataKey;
    return true;
  }
  const auto dtype = expect_ == Expect::kDType ? dtype_named(value) : std::nullopt;
  if (!dtype) refuse(quote_name(value));
  entry_.dtype = *dtype;
  has_dtype_ = true;
  expect_ = Expect::kField;
  return true;
}

bool HeaderReader::start_object(std::size_t) {
  switch (expect_) {
    case Expect::kHeader:
      expect_ = Expect::kTensorName;
      return true;
    case Expect::kTensor:
      expect_ = Expect::kField;
      return true;
    case Expect::kMetadata:
      expect_ = Expect::kMetadataKey;
      return true;
    default:
      refuse("an object");
  }
}

bool HeaderReader::key(string_t& name) {
  switch (expect_) {
    case Expect::kTensorName:
      start_tensor(name);
      return true;
    case Expect::kField:
      start_field(name);
      return true;
    default:
      expect_ = Expect::kMetadataValue;
      return true;
  }
}

void HeaderReader::start_tensor(const string_t& name) {
  if (name == kMetadataName) {
    if (has_metadata_) fail("the header has __metadata__ twice; at most one is accepted");
    has_metadata_ = true;
    expect_ = Expect::kMetadata;
    return;
  }
  entry_ = HeaderEntry{name, DType::kF32, {}, 0, 0};
  if (!names_.insert(name).second) {
    fail("the header has ", tensor(), " twice; every name may occur once");
  }
  has_dtype_ = has_shape_ = has_offsets_ = false;
  expect_ = Expect::kTensor;
}

void HeaderReader::start_field(const string_t& name) {
  bool* seen = nullptr;
  if (name == "dtype") {
    seen = &has_dtype_;
    expect_ = Expect::kDType;
  } else if (name == "shape") {
    seen = &has_shape_;
    expect_ = Expect::kShape;
  } else if (name == "data_offsets") {
    seen = &has_offsets_;
    expect_ = Expect::kOffsets;
  } else {
    fail("the entry of ", tensor(), " has a field ", quote_name(name),
         "; dtype, shape and data_offsets are accepted");
  }
  if (*seen) {
    fail("the entry of ", tensor(), " has the field ", quote_name(name),
         " twice; once is accepted");
  }
}

bool HeaderReader::end_object() {
  if (expect_ == Expect::kField) finish_tensor();
  expect_ = Expect::kTensorName;
  return true;
}

bool HeaderReader::start_array(std::size_t) {
  if (expect_ == Expect::kShape) {
    expect_ = Expect::kShapeItem;
  } else if (expect_ == Expect::kOffsets) {
    offsets_.clear();
    expect_ = Expect::kOffsetItem;
  } else {
    refuse("an array");
  }
  return true;
}

bool HeaderReader::end_array() {
  if (expect_ == Expect::kShapeItem) {
    has_shape_ = true;
  } else {
    finish_offsets();
  }
  expect_ = Expect::kField;
  return true;
}

void HeaderReader::finish_offsets() {
  if (offsets_.size() != 2) {
    fail("the data_offsets of ", tensor(), " are ", offsets_.size(),
         offsets_.size() == 1 ? " number" : " numbers", "; [begin, end] is needed");
  }
  entry_.begin = offsets_[0];
  entry_.end = offsets_[1];
  if (entry_.begin > entry_.end || entry_.end > data_size_) {
    fail("the data_offsets of ", tensor(), " are [", entry_.begin, ", ", entry_.end,
         "]; 0 <= begin <= end <= ", data_size_, ", the bytes after the header, is accepted");
  }
  has_offsets_ = true;
}

void HeaderReader::finish_tensor() {
  const char* missing = !has_dtype_     ? "dtype"
                        : !has_shape_   ? "shape"
                        : !has_offsets_ ? "data_offsets"
                                        : nullptr;
  if (missing) fail("the entry of ", tensor(), " has no ", missing, "; it is needed");
  const std::int64_t bytes = byte_size(entry_.dtype, entry_.shape);
  if (bytes < 0) {
    fail(tensor(), " of shape ", shape_string(entry_.shape), " and dtype ", to_string(entry_.dtype),
         " has more bytes than 63 bits can count; at most the ", data_size_,
         " bytes after the header are accepted");
  }
  const std::uint64_t range = entry_.end - entry_.begin;
  if (static_cast<std::uint64_t>(bytes) != range) {
    fail(tensor(), " of shape ", shape_string(entry_.shape), " and dtype ", to_string(entry_.dtype),
         " needs ", bytes, " bytes, but its data_offsets [", entry_.begin, ", ", entry_.end,
         "] are ", range, " bytes; both must agree");
  }
  entries_.push_back(std::move(entry_));
}

/// The entries must follow one another from the first to the last byte of the data.
void check_coverage(const std::vector<HeaderEntry>& entries, std::uint64_t data_size,
                    const std::string& file) {
  std::vector<const HeaderEntry*> by_place;
  for (const HeaderEntry& entry : entries) by_place.push_back(&entry);
  std::stable_sort(by_place.begin(), by_place.end(), [](const auto* a, const auto* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  const HeaderEntry* last = nullptr;
  for (const HeaderEntry* entry : by_place) {
    const std::uint64_t expected = last ? last->end : 0;
    require(entry->begin >= expected, ErrorCode::kIo, file, ": tensor ", quote_name(entry->name),
            " at bytes ", entry->begin, " to ", entry->end, " overlaps tensor ",
            last ? quote_name(last->name) : "", ", which ends at byte ", expected,
            "; tensors that follow one another are accepted");
    require(entry->begin == expected, ErrorCode::kIo, file, ": bytes ", expected, " to ",
            entry->begin, ", before tensor ", quote_name(entry->name),
            ", belong to no tensor; tensors that follow one another are accepted");
    last = entry;
  }
  const std::uint64_t end = last ? last->end : 0;
  require(end == data_size, ErrorCode::kIo, file, ": the tensors end at byte ", end, " of the ",
          data_size, " bytes after the header; a file without trailing bytes is accepted");
}

}  // namespace

std::string quote_name(std::string_view text) {
  constexpr std::size_t kMaxShown = 64;
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string shown = "'";
  for (const char c : text.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      shown += c;
    } else {
      shown += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  if (text.size() > kMaxShown) shown += "...";
  return shown + "'";
}

std::int64_t byte_size(DType dtype, const std::vector<std::int64_t>& shape) {
  std::int64_t bytes = size_of(dtype);
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return -1;
  }
  return bytes;
}

std::vector<HeaderEntry> parse_header(std::string_view json, std::uint64_t data_size,
                                      const std::string& file) {
  require(json.starts_with('{'), ErrorCode::kIo, file, ": the header starts with ",
          quote_name(json.substr(0, 8)), "; one JSON object, which starts with '{', is needed");
  // The JSON parser would take a zero byte for the end of its input and not see what follows.
  const std::size_t zero = json.find('\0');
  require(zero == json.npos, ErrorCode::kIo, file, ": the header has a zero byte at byte ", zero,
          "; one JSON object, padded with spaces, is needed");
  HeaderReader reader(file, data_size);
  const bool complete = Json::sax_parse(json.begin(), json.end(), &reader);
  ensure(complete, "the header parser stopped without an error");
  std::vector<HeaderEntry> entries = reader.take_entries();
  check_coverage(entries, data_size, file);
  return entries;
}

}  // namespace uniep::io
