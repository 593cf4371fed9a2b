#include "run/pictures.h"

#include <ostream>

#include "base/check.h"
#include "common/output_files.h"
#include "trace/chrome_trace.h"
#include "trace/plot.h"

namespace uniep::tool {

void write_trace(const std::string& path, const RunHeader& header, const StepOptions& options,
                 const StepReport& report) {
  const trace::TraceHeader about{.version = to_string(header.build),
                                 .machine = to_string(header.machine),
                                 .command = header.command,
                                 .schedule = schedule_text(options)};
  write_text(path,
             [&](std::ostream& out) { trace::write_chrome_trace(out, report.timeline, about); });
}

namespace {

std::vector<std::string> plot_notes(const RunHeader& header, const LayerData& layer,
                                    const StepOptions& options) {
  std::vector<std::string> notes = {
      cat("layer: ", header.input),
      cat(dimensions(layer), "; ", options.ranks, options.ranks == 1 ? " rank" : " ranks",
          header.link.empty() ? "" : "; link " + header.link),
      to_string(header.machine), cat("uniep ", to_string(header.build), ", ", header.date),
      header.command};
  if (!header.sharing.empty()) notes.push_back(header.sharing);
  return notes;
}

}  // namespace

void write_plot(const std::string& path, const RunHeader& header, const LayerData& layer,
                const StepOptions& options, const StepReport& report) {
  trace::PlotInput plot;
  plot.page = {.title = "One step of the MoE layer " + header.shape,
               .notes = plot_notes(header, layer, options),
               .schedule = schedule_text(options)};
  plot.num_ranks = options.ranks;
  plot.rows_per_expert = report.rows_per_expert;
  for (const PassRecord& record : report.passes) plot.passes.push_back(record.stats.back());
  plot.timeline = report.timeline;
  write_text(path, [&](std::ostream& out) { out << trace::draw_plot(plot); });
}

}  // namespace uniep::tool
