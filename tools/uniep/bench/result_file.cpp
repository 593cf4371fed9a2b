#include "bench/result_file.h"

#include <optional>

#include "base/check.h"
#include "base/files.h"
#include "tune/files/json_fields.h"

namespace uniep::tool {
namespace {

using tune::Accepted;
using tune::Fields;

constexpr const char* kSchema = "uniep-bench-1";
constexpr Accepted kTime{[](double v) { return v > 0 && v <= 1e12; },
                         "more than 0 and at most 1e12 ms is accepted"};

/// "2 x NVIDIA H200", 0.5: as a sentence shows them.
std::string words(const Json& value) {
  return value.is_string() ? value.get<std::string>() : tune::shown(value);
}

/// What times depend on. Files of benchmarks/compare_torch.py lack some, as do older ones.
std::vector<std::pair<std::string, std::string>> circumstances_of(const Json& file) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const char* key : {"machine", "version", "commit", "build", "backend", "link", "input",
                          "seed", "skew", "warmup", "save", "recompute_h", "backward_rows"}) {
    if (file.contains(key)) all.emplace_back(key, words(file[key]));
  }
  return all;
}

/// `iterations`: passes of a file that does not say how many each case has.
ResultCase case_of(const Json& json, const std::string& path, int iterations) {
  Fields record(json, path);
  ResultCase c{.shape = record.text("shape"),
               .direction = record.text("direction"),
               .given = "",
               .schedule = record.text("schedule")};
  c.ranks = record.integer<int>("ranks", 1, 1 << 20);
  if (json.contains("hosts")) c.hosts = record.integer<int>("hosts", 1, 1 << 20);
  c.ms = record.number("ms", kTime);
  c.p10 = record.number("p10", kTime);
  c.p90 = record.number("p90", kTime);
  c.passes = json.contains("passes") ? record.integer<int>("passes", 1, 1 << 30) : iterations;
  if (json.contains("given")) c.given = record.text("given");
  if (json.contains("arithmetic")) c.arithmetic = record.text("arithmetic");
  return c;
}

}  // namespace

ResultFile result_file_of(const Json& json, const std::string& file) {
  Fields fields(json, "");
  const std::string schema = fields.text("schema");
  require(schema == kSchema, ErrorCode::kIo, "its schema is '", schema, "'; ", kSchema,
          " is accepted");
  ResultFile all{.file = file, .circumstances = circumstances_of(json), .results = {}};
  const int iterations = fields.integer<int>("iterations", 1, 1 << 30);
  std::size_t index = 0;
  for (const Json& record : fields.list("records")) {
    const std::string path = cat("records[", index++, ']');
    require(record.is_object(), ErrorCode::kIo, path, " is ", tune::shown(record),
            "; an object is accepted");
    // Stages, and what no schedule changes, are not compared.
    if (record.contains("pass") || !record.contains("schedule") || record["schedule"].is_null()) {
      continue;
    }
    all.results.push_back(case_of(record, path, iterations));
  }
  return all;
}

ResultFile read_result_file(const std::string& path) {
  std::optional<std::string> text;
  try {
    text = read_text(path);
  } catch (const Error& e) {
    throw Error(e.code(), cat("cannot read --against ", e.what()));
  }
  require(text.has_value(), ErrorCode::kIo, "cannot read --against ", display_name(path),
          ": there is none; a file that `uniep bench --json` wrote is accepted");
  try {
    return result_file_of(tune::parse_json(*text), path);
  } catch (const Error& e) {
    throw Error(ErrorCode::kIo,
                cat("--against ", display_name(path), " cannot be used: ", e.what()));
  }
}

}  // namespace uniep::tool
