#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <utility>

#include "base/check.h"
#include "base/quotes.h"
#include "base/utc_now.h"
#include "commands.h"
#include "common/machine.h"
#include "common/options.h"
#include "common/output_files.h"
#include "common/record_json.h"
#include "common/table.h"
#include "compare/tensor_difference.h"
#include "io/safetensors.h"

namespace uniep::tool {
namespace {

using enum Table::Align;

/// Reasons that are named one by one, and letters of a tensor's name in the table.
constexpr std::size_t kMostNamed = 8;
constexpr std::size_t kWidestName = 24;

/// The width of a line of a sentence, besides what stands before it.
constexpr std::size_t kWidestLine = 96;

struct Flags {
  std::string a;
  std::string b;
  std::string json;
};

struct ComparedTensor {
  const io::Tensor* tensor;  ///< of the first file
  TensorDifference difference;
};

struct Comparison {
  std::vector<ComparedTensor> tensors;  ///< that both files have alike, in the first one's order
  std::size_t left_out = 0;             ///< other tensors
  std::vector<std::string> unusable;    ///< why these cannot be compared

  bool equal() const {
    return unusable.empty() && std::ranges::all_of(tensors, [](const ComparedTensor& t) {
             return t.difference.differing == 0;
           });
  }
};

std::string kind_text(const io::Tensor& t) {
  return cat(io::to_string(t.dtype), ' ', io::shape_string(t.shape));
}

/// "'dx', 'dprobs' and 3 more"
std::string names_text(const std::vector<std::string>& names) {
  std::string text;
  const std::size_t named = std::min(names.size(), kMostNamed);
  for (std::size_t i = 0; i < named; ++i) text += cat(i == 0 ? "" : ", ", in_quotes(names[i]));
  if (named < names.size()) text += cat(" and ", names.size() - named, " more");
  return text;
}

/// Takes note of the tensors of one file that the other does not have.
void add_lonely(Comparison& c, const io::TensorFile& file, const io::TensorFile& other,
                const char* name) {
  std::vector<std::string> lonely;
  for (const io::Tensor& tensor : file.tensors) {
    if (other.find(tensor.name) == nullptr) lonely.push_back(tensor.name);
  }
  if (lonely.empty()) return;
  c.left_out += lonely.size();
  c.unusable.push_back(cat("only ", name, " has ", names_text(lonely)));
}

Comparison comparison_of(const io::TensorFile& a, const io::TensorFile& b) {
  Comparison c;
  for (const io::Tensor& tensor : a.tensors) {
    const io::Tensor* other = b.find(tensor.name);
    if (other == nullptr) continue;
    if (tensor.dtype != other->dtype || tensor.shape != other->shape) {
      ++c.left_out;
      c.unusable.push_back(cat("tensor ", in_quotes(tensor.name), " is ", kind_text(tensor),
                               " in a and ", kind_text(*other), " in b"));
    } else {
      c.tensors.push_back({&tensor, difference_of(tensor, *other)});
    }
  }
  add_lonely(c, a, b, "a");
  add_lonely(c, b, a, "b");
  return c;
}

void print_table(const Comparison& c) {
  if (c.tensors.empty()) return;
  std::cout << "#\n# differ: elements that have not the same bits; bits: of these, how many; not "
               "finite: of these,\n# with a NaN or infinity; rel. L2: |a - b| / |a|; largest: "
               "|a - b|; both of finite numbers\n";
  Table table({kLeft, kRight, kRight, kRight, kRight, kRight, kRight});
  table.header({"", "", "", "", "not", "", ""});
  table.header({"tensor", "elements", "differ", "bits", "finite", "rel. L2", "largest"});
  for (const auto& [tensor, d] : c.tensors) {
    table.row({shortened(tensor->name, kWidestName), cat(d.elements), cat(d.differing),
               cat(d.differing_bits), cat(d.not_finite), formatted("%.2e", d.relative_l2),
               formatted("%.2e", d.largest)});
  }
  std::cout << table;
}

void print_first(const Comparison& c) {
  std::cout << "#\n";
  for (const auto& [tensor, d] : c.tensors) {
    if (!d.first) continue;
    const auto text = [dtype = tensor->dtype](std::uint64_t bits) {
      return element_text(dtype, bits);
    };
    const std::string sentence =
        cat("first of ", shortened(tensor->name, kWidestName), ": ",
            place_text(tensor->name, d.first->index), " is ", text(d.first->a_bits), " in a, ",
            text(d.first->b_bits), " in b");
    const char* start = "# ";
    for (const std::string& line : folded(sentence, kWidestLine)) {
      std::cout << std::exchange(start, "#   ") << line << '\n';
    }
  }
}

std::string verdict(const Comparison& c) {
  const auto n = c.tensors.size();
  const std::string of_all = cat(n, n == 1 ? " tensor" : " tensors");
  const auto different = std::ranges::count_if(
      c.tensors, [](const ComparedTensor& t) { return t.difference.differing != 0; });
  const std::string left_out =
      c.left_out == 0 ? ""
                      : cat("; not compared: ", c.left_out, c.left_out == 1 ? " other" : " others");
  return cat(different == 0 ? "equal bits: " : cat("different: ", different, " of "), of_all,
             left_out);
}

Json number_or_null(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json first_json(const io::Tensor& tensor, const TensorDifference& d) {
  if (!d.first) return nullptr;
  return {{"index", d.first->index},
          {"place", place_text(tensor.name, d.first->index)},
          {"a", element_text(tensor.dtype, d.first->a_bits)},
          {"b", element_text(tensor.dtype, d.first->b_bits)}};
}

Json tensor_json(const ComparedTensor& t) {
  const auto& [tensor, d] = t;
  return {{"tensor", tensor->name},
          {"dtype", io::to_string(tensor->dtype)},
          {"shape", tensor->shape},
          {"elements", d.elements},
          {"differing", d.differing},
          {"differing_bits", d.differing_bits},
          {"not_finite", d.not_finite},
          {"relative_l2", number_or_null(d.relative_l2)},
          {"largest_difference", number_or_null(d.largest)},
          {"first", first_json(*tensor, d)}};
}

void write_file(const Flags& flags, const Invocation& invocation, const Comparison& c) {
  Json tensors = Json::array();
  for (const ComparedTensor& t : c.tensors) tensors.push_back(tensor_json(t));
  write_json(flags.json, {{"schema", "uniep-compare-1"},
                          {"version", this_build().version},
                          {"commit", this_build().commit},
                          {"date", utc_now()},
                          {"command", invocation.command},
                          {"a", flags.a},
                          {"b", flags.b},
                          {"equal", c.equal()},
                          {"tensors", tensors},
                          {"unusable", c.unusable}});
}

void require_all_compared(const Comparison& c) {
  if (c.unusable.empty()) return;
  std::string reasons;
  const std::size_t named = std::min(c.unusable.size(), kMostNamed);
  for (std::size_t i = 0; i < named; ++i) reasons += cat(i == 0 ? "" : "; ", c.unusable[i]);
  if (named < c.unusable.size()) reasons += cat("; and ", c.unusable.size() - named, " more");
  throw Error(ErrorCode::kIo, cat(reasons, "; two files with the same tensors are accepted"));
}

int run(const Flags& flags, const Invocation& invocation) {
  require_usable_outputs({{"--json", flags.json}}, {{"A", flags.a}, {"B", flags.b}});
  const io::TensorFile a = io::read_safetensors(flags.a);
  const io::TensorFile b = io::read_safetensors(flags.b);
  const Comparison c = comparison_of(a, b);
  Notes files;
  files.add("a", flags.a);
  files.add("b", flags.b);
  std::cout << files;
  print_table(c);
  print_first(c);
  std::cout << "# " << verdict(c) << std::endl;  // before what stderr has to say
  if (!flags.json.empty()) write_file(flags, invocation, c);
  require_all_compared(c);
  return c.equal() ? kExitOk : kExitFailed;
}

void add_file(CLI::App& sub, const char* name, std::string& path) {
  OptionGroup(sub)
      .add(name, path, "FILE.safetensors", "A safetensors file: results, a layer, or any other")
      ->required();
}

}  // namespace

void add_compare(CLI::App& app, Invocation& invocation) {
  CLI::App* sub =
      add_command(app, "compare", "Compare two files of results, or of layers, bit by bit");
  const auto flags = std::make_shared<Flags>();
  add_file(*sub, "A", flags->a);
  add_file(*sub, "B", flags->b);
  OptionGroup group(*sub, "What to do with the results");
  group.add("--json", flags->json, "FILE.json", "Write the figures; see docs/results.md");
  sub->footer(
      "Example:\n"
      "  uniep compare a.safetensors b.safetensors\n"
      "\n"
      "Exits with 0 where all bits are equal; with 1 where some are not; with 2 where the files "
      "cannot be compared: a tensor is missing, or has another shape or type.");
  sub->callback([flags, &invocation] { invocation.exit_code = run(*flags, invocation); });
}

}  // namespace uniep::tool
