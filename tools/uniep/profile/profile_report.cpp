#include "profile/profile_report.h"

#include <iostream>

#include "base/check.h"
#include "base/env.h"
#include "common/table.h"
#include "schedule/constraints.h"

namespace uniep::tool {
namespace {

using enum Table::Align;

std::string microseconds(double seconds) { return formatted("%.1f", 1e6 * seconds); }
std::string gbps(double bytes_per_s) { return formatted("%.1f", 1e-9 * bytes_per_s); }

/// Tiles that a table shows: of one size, summed over two lengths.
struct ShownTiles {
  double m, n, short_k, long_k;
};
ShownTiles shown_tiles(const tune::GemmCost& cost) {
  if (cost.tile_n == 0) return {64, 128, 256, 1024};
  return {kCudaTileM, static_cast<double>(cost.tile_n), 1024, 4096};
}

double tile_seconds(const tune::GemmCost& c, double m, double n, double k) {
  return c.fixed + c.per_mnk * m * n * k + c.per_mk * m * k + c.per_nk * n * k + c.per_mn * m * n;
}

std::string link_note(const tune::MachineProfile& p) {
  if (p.backend == Backend::kCpu) return p.link.bytes_per_s == 0 ? "none" : link_text();
  return cat(gbps(p.link.bytes_per_s), " GB/s, pulls ", gbps(p.link.pull_bytes_per_s), ", ",
             microseconds(p.link.latency_s), " us, flags ", microseconds(p.wake.flag_s),
             " us; products beside it ", formatted("%.2f", p.beside_link), " times as long");
}

Notes notes_of(const tune::MachineProfile& p) {
  Notes notes;
  notes.add("machine", p.device);
  notes.add("source", p.source);
  notes.add("pass", cat(microseconds(p.enter.fixed), " us, and ", microseconds(p.launch_s),
                        " us a launch"));
  notes.add("link", link_note(p));
  return notes;
}

Table tile_table(const tune::MachineProfile& p) {
  const bool gpu = p.backend == Backend::kCuda;
  const double workers = gpu ? p.workers : 1;
  const std::string rate = gpu ? "(TFLOP/s)" : "(GFLOP/s)";
  const ShownTiles t = shown_tiles(p.gemms[0]);
  const std::string short_k = cat("k=", t.short_k), long_k = cat("k=", t.long_k);
  Table table({kLeft, kRight, kRight, kRight, kRight});
  table.header({"", "", short_k, long_k, long_k});
  table.header({"stage", "tile", "(us)", "(us)", rate});
  for (const tune::GemmCost& c : p.gemms) {
    const ShownTiles s = shown_tiles(c);
    const double seconds = tile_seconds(c, s.m, s.n, s.long_k);
    table.row(
        {name(c.stage), cat(s.m, " x ", s.n), microseconds(tile_seconds(c, s.m, s.n, s.short_k)),
         microseconds(seconds),
         formatted("%.1f", (gpu ? 1e-12 : 1e-9) * workers * 2 * s.m * s.n * s.long_k / seconds)});
  }
  return table;
}

Table fit_table(const std::vector<tune::FitReport>& fits) {
  Table table({kLeft, kRight, kRight, kRight, kLeft});
  table.header({"", "", "mean", "largest", ""});
  table.header({"fit", "samples", "error", "error", "seconds"});
  for (const tune::FitReport& fit : fits) {
    table.row({fit.what, cat(fit.samples), formatted("%.1f %%", 100 * fit.mean_error),
               formatted("%.1f %%", 100 * fit.worst_error), fit.result});
  }
  return table;
}

Table link_table(const std::vector<tune::LinkFigure>& figures) {
  Table table({kLeft, kRight});
  table.header({"transfers of a rank", "(GB/s)"});
  for (const tune::LinkFigure& f : figures) table.row({f.what, gbps(f.bytes_per_s)});
  return table;
}

}  // namespace

void print_profile(const tune::MeasuredProfile& measured) {
  const tune::MachineProfile& p = measured.profile;
  const bool gpu = p.backend == Backend::kCuda;
  std::cout << notes_of(p) << "#\n# a " << (gpu ? "CTA" : "core")
            << "'s time for a tile, summed over k; the rate "
            << (gpu ? cat("of all ", p.workers) : "of one") << '\n'
            << tile_table(p) << "#\n"
            << fit_table(measured.fits);
  if (!measured.link.empty()) std::cout << "#\n" << link_table(measured.link);
}

}  // namespace uniep::tool
