#include "bench/bench_report.h"

#include <algorithm>
#include <functional>
#include <ostream>

#include "base/check.h"
#include "base/files.h"
#include "base/quantile.h"
#include "bench/bench_sample.h"
#include "bench/device_ranks.h"
#include "common/record_json.h"
#include "common/table.h"
#include "run/stage_figures.h"

namespace uniep::tool {
namespace {

std::string or_dash(const char* format, const std::optional<double>& value) {
  return value ? formatted(format, *value) : "-";
}

std::string direction_name(const BenchRow& row) {
  return row.stage ? name(*row.stage) : name(row.pass);
}

std::vector<BenchRow> rows_of(const BenchEntry& entry, const BenchPass& pass) {
  return bench_rows(pass, entry.bench.spec, entry.bench.rows(), entry.report.floors);
}

/// The schedule of a direction that number `schedule` stood for.
const Schedule& used_schedule(const BenchEntry& entry, std::size_t schedule, Pass pass) {
  const tune::LayerSchedules& used = entry.report.used[schedule];
  return (pass == Pass::kForward ? used.forward : used.backward).schedule;
}

Record record_of(const BenchEntry& entry, std::size_t schedule, const BenchRow& row) {
  return {.shape = entry.bench.name,
          .ranks = entry.bench.ranks,
          .hosts = entry.bench.hosts,
          .direction = direction_name(row),
          .schedule = to_string(used_schedule(entry, schedule, row.pass)),
          .seconds = row.seconds,
          .floor_s = row.floor_s,
          .wrong = row.wrong};
}

/// Calls `each(schedule number, row)` for the rows of all schedules, in the order of the table.
void for_each_row(const BenchEntry& entry,
                  const std::function<void(std::size_t, const BenchRow&)>& each) {
  for (std::size_t s = 0; s < entry.report.schedules.size(); ++s) {
    for (const BenchPass& pass : entry.report.schedules[s]) {
      for (const BenchRow& row : rows_of(entry, pass)) each(s, row);
    }
  }
}

Wrong wrong_of(const BenchEntry& entry) {
  Wrong all;
  for (const auto& passes : entry.report.schedules) {
    for (const BenchPass& pass : passes) all += pass.wrong.value_or(Wrong{});
  }
  return all;
}

std::vector<std::string> cells(const BenchEntry& entry, std::size_t schedule, const BenchRow& row) {
  const Record record = record_of(entry, schedule, row);
  const auto efficiency = record.efficiency();
  return {name(row.pass),
          row.stage ? name(*row.stage) : "all",
          cat(schedule),
          milliseconds(median(row.seconds)),
          milliseconds(quantile(row.seconds, 0.1)),
          milliseconds(quantile(row.seconds, 0.9)),
          or_dash("%.3g", row.tflops),
          or_dash("%.3g", row.gbps),
          row.floor_s ? milliseconds(*row.floor_s) : "-",
          efficiency ? formatted("%.1f", 100 * *efficiency) : "-",
          row.wrong ? cat(*row.wrong) : "-"};
}

/// Passes of a direction that were measured under a schedule.
std::size_t passes_of(const BenchEntry& entry, std::size_t schedule, Pass pass) {
  if (schedule >= entry.report.schedules.size()) return 0;
  const std::vector<BenchPass>& measured = entry.report.schedules[schedule];
  const auto found = std::ranges::find(measured, pass, &BenchPass::pass);
  return found == measured.end() ? 0 : found->passes();
}

bool has_passes(const BenchEntry& entry) {
  return std::ranges::any_of(entry.report.schedules,
                             [](const auto& passes) { return !passes.empty(); });
}

/// What an interrupted shape lacks: "interrupted: medians of 37 of 200 passes of forward under
/// schedule 0; not measured: backward under schedule 0".
std::string missing_text(const BenchEntry& entry, const BenchOptions& options) {
  const auto wanted = static_cast<std::size_t>(options.iterations);
  std::string fewer, none;
  for (std::size_t s = 0; s < options.schedules.size(); ++s) {
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      if (!measures(options.passes, pass)) continue;
      const std::size_t passes = passes_of(entry, s, pass);
      const std::string what = cat(name(pass), " under schedule ", s);
      if (passes == 0) none += cat(none.empty() ? "not measured: " : ", ", what);
      if (passes == 0 || passes >= wanted) continue;
      fewer += cat("medians of ", passes, " of ", counted(wanted, "pass", "passes"), " of ", what);
    }
  }
  return cat("interrupted: ", fewer, fewer.empty() || none.empty() ? "" : "; ", none);
}

/// What auto stood for.
void add_looked_up(Notes& notes, const BenchEntry& entry, const BenchOptions& options) {
  for (std::size_t s = 0; s < entry.report.used.size(); ++s) {
    if (options.schedules[s].schedule) continue;
    const tune::LayerSchedules& used = entry.report.used[s];
    notes.add(cat("schedule ", s), schedules_text(used.forward.schedule, used.backward.schedule,
                                                  tune::origin_text(used)));
  }
}

Notes shape_notes(const BenchEntry& entry, const BenchOptions& options) {
  const BenchCase& b = entry.bench;
  Notes notes;
  notes.add("shape",
            cat(display_name(b.name), ": ", b.file.empty() ? "" : "up to ", b.spec.tokens,
                " tokens per rank, hidden ", b.spec.hidden, ", intermediate ", b.spec.intermediate,
                ", ", b.spec.num_experts, " experts, top-", b.spec.topk));
  const std::string arithmetic = arithmetic_text(b.problem);
  if (!arithmetic.empty()) notes.add("experts", arithmetic);
  notes.add("load", load_text(b.rows_per_expert));
  if (b.problem.save != Save::kRows || b.problem.recompute_h) {
    notes.add("kept", cat("save=", name(b.problem.save),
                          b.problem.recompute_h ? ", h is computed again" : ""));
  }
  if (b.problem.backward_rows > 0) {
    notes.add("backward", cat("works in ", b.problem.backward_rows, " rows at a time"));
  }
  add_looked_up(notes, entry, options);
  return notes;
}

std::string inputs_note(const BenchHeader& header) {
  if (header.input.empty()) return cat("made up, seed=", header.seed, ", skew=", header.skew);
  return cat(display_name(header.input), ", whose routing has a skew of ", header.skew);
}

std::string check_note(bool check) {
  if (!check) return "none (--no-check)";
  return cat(
      "#wrong are elements that differ in a bit, in any measured pass, from schedule "
      "sequential at the same ranks, and sampled ones further than ",
      formatted("%.0f", 100 * kMaxSampleError), " % from float64");
}

std::string sample_note() {
  return cat("on each rank out, dx and dprobs of ", kSampledTokens, " tokens; of one expert 2 x ",
             kSampledColumns, " x ", kSampledHidden, " elements of dw1 and ", kSampledHidden, " x ",
             kSampledColumns, " of dw2");
}

Json row_json(const BenchEntry& entry, const std::string& given, std::size_t schedule,
              const BenchRow& row) {
  Json json = record_json(record_of(entry, schedule, row));
  json["given"] = given;
  json["arithmetic"] = arithmetic_words(entry.bench.problem);
  json["passes"] = row.seconds.size();
  if (row.stage) json["pass"] = name(row.pass);
  json["tflops"] = or_null(row.tflops);
  json["gbps"] = or_null(row.gbps);
  return json;
}

Json rows_json(const std::vector<BenchEntry>& entries, const BenchOptions& options) {
  Json rows = Json::array();
  for (const BenchEntry& entry : entries) {
    for_each_row(entry, [&](std::size_t schedule, const BenchRow& row) {
      rows.push_back(row_json(entry, options.schedules[schedule].given, schedule, row));
    });
  }
  return rows;
}

Json check_json(const BenchOptions& options, const std::vector<BenchEntry>& entries) {
  if (!options.check) return nullptr;
  const Wrong wrong = all_wrong(entries);
  return {{"compared", wrong.compared},
          {"differing", wrong.differing},
          {"sampled", wrong.sampled},
          {"inexact", wrong.inexact},
          {"not_finite", wrong.not_finite}};
}

std::string verdict_text(const Wrong& wrong) {
  const std::string bits =
      cat(wrong.differing, " of ", wrong.compared, " elements differ from sequential in a bit");
  if (wrong.is_overflow()) {
    return cat("check OVERFLOW: ", bits, "; ", wrong.not_finite, " of ", wrong.sampled,
               " sampled ones are infinite or NaN, as numbers beyond the range of bf16 or fp32 "
               "make them: uniep run --check says whether the reference has the same");
  }
  return cat("check ", wrong.total() == 0 ? "PASSED" : "FAILED", ": ", bits, ", ", wrong.inexact,
             " of ", wrong.sampled, " sampled ones are too far from float64",
             wrong.not_finite == 0 ? "" : cat(", ", wrong.not_finite, " of them infinite or NaN"));
}

}  // namespace

Wrong all_wrong(const std::vector<BenchEntry>& entries) {
  Wrong all;
  for (const BenchEntry& entry : entries) all += wrong_of(entry);
  return all;
}

void print_bench_header(std::ostream& out, const BenchHeader& header, const BenchOptions& options) {
  Notes notes;
  notes.add("uniep", to_string(header.build) + ", backend " + header.backend);
  notes.add("machine", header.machine);
  notes.add("date", header.date);
  notes.add("command", header.command);
  notes.add("ranks", ranks_text(options.ranks, options.hosts));
  if (!header.link.empty()) notes.add("link", header.link);
  if (!header.sharing.empty()) notes.add("sharing", header.sharing);
  notes.add("inputs", inputs_note(header));
  for (std::size_t s = 0; s < options.schedules.size(); ++s) {
    const auto& given = options.schedules[s].schedule;
    notes.add(cat("schedule ", s), given ? to_string(*given) : "auto: looked up for each shape");
  }
  notes.add("figures",
            cat("medians of ", counted(options.iterations, "pass", "passes"), " after ",
                options.warmup, " for warming up, of the slowest rank; TFLOP/s and GB/s per rank"));
  notes.add("floor", header.no_floor.empty()
                         ? cat("bare GEMMs by batched cuBLAS, a rank's rows spread evenly over its "
                               "experts, or the wire at ",
                               kLinkBytesPerSecond * 1e-9,
                               " GB/s where that takes longer; of the busiest rank")
                         : "none: " + header.no_floor);
  notes.add("check", check_note(options.check));
  if (options.check) notes.add("samples", sample_note());
  out << notes << std::flush;
}

void print_bench(std::ostream& out, const BenchEntry& entry, const BenchOptions& options) {
  using enum Table::Align;
  std::vector<Table::Align> align(11, kRight);
  std::fill_n(align.begin(), 2, kLeft);
  Table table(std::move(align));
  table.header({"", "", "sche-", "time", "p10", "p90", "", "", "floor", "% of", ""});
  table.header({"pass", "stage", "dule", "(ms)", "(ms)", "(ms)", "TFLOP/s", "GB/s", "(ms)", "floor",
                "#wrong"});
  for_each_row(entry, [&](std::size_t schedule, const BenchRow& row) {
    table.row(cells(entry, schedule, row));
  });
  out << "#\n" << shape_notes(entry, options);
  if (has_passes(entry)) out << table;
  if (entry.report.interrupted) out << comment(missing_text(entry, options));
  out << std::flush;
}

void print_bench_verdict(std::ostream& out, const std::vector<BenchEntry>& entries,
                         const BenchOptions& options) {
  out << "#\n";
  if (!options.check) {
    out << "# done: not checked (--no-check)\n";
    return;
  }
  const Wrong wrong = all_wrong(entries);
  if (wrong.compared == 0) {
    const bool measured = std::ranges::any_of(entries, has_passes);
    out << "# nothing was checked: "
        << (measured ? "the results have no elements\n" : "no pass was measured\n");
    return;
  }
  out << comment(verdict_text(wrong));
}

Json bench_json(const BenchHeader& header, const BenchOptions& options,
                const std::vector<BenchEntry>& entries) {
  const bool interrupted = std::ranges::any_of(
      entries, [](const BenchEntry& entry) { return entry.report.interrupted; });
  return {{"schema", "uniep-bench-1"},
          {"version", header.build.version},
          {"commit", header.build.commit},
          {"build", to_string(header.build)},
          {"machine", header.machine},
          {"date", header.date},
          {"command", header.command},
          {"backend", header.backend},
          {"link", header.link.empty() ? Json(nullptr) : Json(header.link)},
          {"input", header.input.empty() ? Json(nullptr) : Json(header.input)},
          {"seed", header.input.empty() ? Json(header.seed) : Json(nullptr)},
          {"save", header.save},
          {"recompute_h", header.recompute_h},
          {"backward_rows", header.backward_rows},
          {"skew", header.skew},
          {"iterations", options.iterations},
          {"warmup", options.warmup},
          {"interrupted", interrupted},
          {"check", check_json(options, entries)},
          {"records", rows_json(entries, options)}};
}

}  // namespace uniep::tool
