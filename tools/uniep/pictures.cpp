#include "pictures.h"

#include <ostream>

#include "base/check.h"
#include "output_files.h"
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

void write_plot(const std::string& path, const RunHeader& header, const LayerData& layer,
                const StepOptions& options, const StepReport& report) {
  trace::PlotInput plot;
  plot.title = "One step of the MoE layer " + header.shape;
  plot.notes = {
      cat(dimensions(layer), "; ", options.ranks, options.ranks == 1 ? " rank" : " ranks",
          header.link.empty() ? "" : "; link " + header.link),
      cat(to_string(header.machine), "; uniep ", to_string(header.build), "; ", header.date),
      header.command};
  plot.schedule = schedule_text(options);
  plot.num_ranks = options.ranks;
  plot.rows_per_expert = report.rows_per_expert;
  for (const PassRecord& record : report.passes) plot.passes.push_back(record.stats.back());
  plot.timeline = report.timeline;
  write_text(path, [&](std::ostream& out) { out << trace::draw_plot(plot); });
}

}  // namespace uniep::tool
