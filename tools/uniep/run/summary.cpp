#include "run/summary.h"

#include <algorithm>
#include <ostream>

#include "base/check.h"
#include "common/arithmetic.h"
#include "common/ranks.h"
#include "common/table.h"
#include "run/stage_figures.h"
#include "workload/split.h"

namespace uniep::tool {
namespace {

/// "512", or "511 to 512" where ranks differ.
std::string tokens_per_rank(const LayerData& layer, int ranks) {
  const workload::Split split(layer, ranks);
  std::int64_t least = layer.tokens;
  std::int64_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    least = std::min(least, split.tokens(r).size());
    most = std::max(most, split.tokens(r).size());
  }
  return least == most ? cat(most) : cat(least, " to ", most);
}

std::string widths_text(const LayerData& layer) {
  const std::string arithmetic = arithmetic_text({.activation = layer.activation,
                                                  .probs = layer.probs,
                                                  .bias = layer.has_bias(),
                                                  .combine_groups = layer.combine_groups,
                                                  .combine_partials = layer.combine_partials,
                                                  .shared_experts = layer.shared_experts});
  return cat("hidden ", layer.hidden, ", intermediate ", layer.intermediate, ", ",
             layer.num_experts, " experts, top-", layer.topk, arithmetic.empty() ? "" : ", ",
             arithmetic, layer.shared_probs.empty() ? "" : " with a gate");
}

/// A shape names the tokens of a rank, a file has those of all.
std::string tokens_text(const LayerData& layer, const RunHeader& header, int ranks) {
  if (!header.made_up || ranks == 1) return counted(layer.tokens, "token", "tokens");
  return cat(tokens_per_rank(layer, ranks), " tokens a rank, ", layer.tokens, " in all");
}

int workers(const StepReport& report) {
  int most = 0;
  for (const PassRecord& record : report.passes) {
    for (const auto& step : record.stats) {
      for (const PassStats& stats : step) most = std::max(most, stats.workers);
    }
  }
  return most;
}

std::string timing_note(int steps) {
  return cat(steps == 1 ? "one step" : cat("medians of ", steps, " steps"), " after a warm-up");
}

std::string whole_pass_note(const PassRecord& record) {
  std::string text = cat(milliseconds(median(record.seconds)), " ms");
  if (record.seconds.size() > 1) {
    const auto [least, most] = std::ranges::minmax(record.seconds);
    text += cat(" (min ", milliseconds(least), ", max ", milliseconds(most), ")");
  }
  return text;
}

std::string pulled_note(const WireFigures& wire) {
  const auto before = static_cast<double>(wire.pulled_no_dedup);
  const auto after = static_cast<double>(wire.pulled);
  std::string text =
      cat(bytes_text(before), " before deduplication, ", bytes_text(after), " after it");
  if (before > 0) text += formatted(" (%.0f %%)", 100 * after / before);
  return text;
}

std::string percent(double share) { return formatted("%.1f", 100 * share); }

/// The table of the stages, with a last column if there is a timeline.
Table stage_table(const std::vector<StageFigures>& stages, const std::optional<TimeFigures>& time) {
  std::vector<Table::Align> align(time ? 9 : 8, Table::Align::kRight);
  align[0] = Table::Align::kLeft;
  Table table(std::move(align));
  const auto row = [&](std::vector<std::string> cells, const std::string& last) {
    if (time) cells.push_back(last);
    return cells;
  };
  table.header(row({"", "", "busy", "busy", "wait", "wait", "link", "link"}, "time"));
  table.header(row({"stage", "tasks", "sum", "max", "sum", "max", "sum", "max"}, "share"));
  table.header(row({"", "", "(ms)", "(ms)", "(ms)", "(ms)", "(ms)", "(ms)"}, "(%)"));
  for (const StageFigures& f : stages) {
    const auto ms = [](const std::vector<double>& v) { return milliseconds(median(v)); };
    table.row(row({name(f.stage), cat(f.tasks), ms(f.busy_s.sum), ms(f.busy_s.max),
                   ms(f.wait_s.sum), ms(f.wait_s.max), ms(f.link_s.sum), ms(f.link_s.max)},
                  time ? percent(time->of(f.stage)) : ""));
  }
  return table;
}

void add_time_notes(Notes& notes, const TimeFigures& time) {
  notes.add("time share", cat("stages as above, waiting ", percent(time.waiting),
                              " %, without a task ", percent(time.idle), " %"));
  notes.add("exposed", cat(milliseconds(time.exposed_s),
                           " ms of communication beside which no worker of its rank computes"));
  notes.add("tail",
            cat(milliseconds(time.tail_s), " ms from the first worker without tasks to the last"));
  if (time.clock_hz > 0) {
    notes.add("clock",
              formatted("%.0f MHz of the SMs while at tasks, on the rank where it is lowest",
                        1e-6 * time.clock_hz));
  }
}

Notes pass_notes(const PassRecord& record, const std::vector<StageFigures>& stages) {
  double wait_s = 0;
  double link_s = 0;
  for (const StageFigures& f : stages) {
    wait_s += median(f.wait_s.sum);
    link_s += median(f.link_s.sum);
  }
  const WireFigures wire = wire_figures(record);
  Notes notes;
  notes.add("pulled", pulled_note(wire));
  notes.add("pushed", bytes_text(static_cast<double>(wire.pushed)));
  notes.add("waiting", cat(milliseconds(wait_s + link_s), " ms: for inputs ", milliseconds(wait_s),
                           ", for the link ", milliseconds(link_s)));
  notes.add("whole pass", whole_pass_note(record));
  return notes;
}

void print_pass(std::ostream& out, const PassRecord& record,
                const std::optional<TimeFigures>& time) {
  const std::vector<StageFigures> stages = stage_figures(record);
  Notes notes = pass_notes(record, stages);
  if (time) add_time_notes(notes, *time);
  out << "#\n# " << name(record.pass) << '\n' << stage_table(stages, time) << notes;
}

}  // namespace

std::string dimensions(const LayerData& layer) {
  return cat(layer.tokens, " tokens, ", widths_text(layer));
}

void print_header(std::ostream& out, const RunHeader& header, const LayerData& layer,
                  const StepOptions& options) {
  Notes notes;
  notes.add("uniep", to_string(header.build) + ", backend " + options.backend);
  notes.add("machine", to_string(header.machine));
  notes.add("date", header.date);
  notes.add("input", cat(header.input, ": ", tokens_text(layer, header, options.ranks), ", ",
                         widths_text(layer)));
  notes.add("ranks", cat(ranks_text(options.ranks, options.hosts), ", each with ",
                         tokens_per_rank(layer, options.ranks), " tokens and ",
                         layer.num_experts / options.ranks, " experts"));
  if (!header.link.empty()) notes.add("link", header.link);
  if (!header.sharing.empty()) notes.add("sharing", header.sharing);
  notes.add("schedule", schedule_text(options));
  out << notes << std::flush;
}

void print_figures(std::ostream& out, const StepReport& report) {
  const LoadFigures load = load_figures(report);
  Notes notes;
  notes.add("rows", cat(load.rows, ", of these ", load.remote_rows, " from another rank"));
  notes.add("load", load_text(report.rows_per_expert));
  if (report.pool.pages > 0) {
    notes.add("row pool", cat("a rank held at most ", report.pool.most_held, " of its ",
                              report.pool.pages, " pages of ", report.pool.page_bytes, " bytes"));
  }
  if (report.steps > 0) {
    notes.add("plan", milliseconds(median(report.plan_seconds)) + " ms");
    notes.add("workers", cat(workers(report), " per rank"));
    notes.add("figures", cat(timing_note(report.steps),
                             "; sum: all ranks and workers, max: the rank with the most"));
  }
  out << "#\n" << notes;
  for (const PassRecord& record : report.passes) {
    print_pass(out, record, time_figures(report, record.pass));
  }
}

}  // namespace uniep::tool
