#include "run/results_json.h"

#include <ostream>

#include "common/output_files.h"
#include "common/record_json.h"
#include "run/stage_figures.h"

namespace uniep::tool {
namespace {

double ms(double seconds) { return 1e3 * seconds; }

Json record(const RunHeader& header, const StepOptions& options, Pass pass, const char* direction,
            const std::vector<double>& seconds) {
  return record_json({.shape = header.shape,
                      .ranks = options.ranks,
                      .hosts = options.hosts,
                      .direction = direction,
                      .schedule = to_string(schedule_of(options, pass)),
                      .seconds = seconds});
}

Json stage_record(const RunHeader& header, const StepOptions& options, Pass pass,
                  const StageFigures& f, const std::optional<TimeFigures>& time) {
  Json json = record(header, options, pass, name(f.stage), f.busy_s.max);
  json["pass"] = name(pass);
  json["tasks"] = f.tasks;
  json["busy_sum_ms"] = ms(median(f.busy_s.sum));
  json["busy_max_ms"] = ms(median(f.busy_s.max));
  json["wait_sum_ms"] = ms(median(f.wait_s.sum));
  json["wait_max_ms"] = ms(median(f.wait_s.max));
  json["link_sum_ms"] = ms(median(f.link_s.sum));
  json["link_max_ms"] = ms(median(f.link_s.max));
  if (time) json["time_share"] = time->of(f.stage);
  return json;
}

Json pass_record(const RunHeader& header, const StepOptions& options, const PassRecord& pass,
                 const std::optional<TimeFigures>& time, const std::vector<TensorCheck>& checks) {
  Json json = record(header, options, pass.pass, name(pass.pass), pass.seconds);
  const WireFigures wire = wire_figures(pass);
  json["min"] = ms(std::ranges::min(pass.seconds));
  json["max"] = ms(std::ranges::max(pass.seconds));
  json["pulled_bytes"] = wire.pulled;
  json["pulled_bytes_no_dedup"] = wire.pulled_no_dedup;
  json["pushed_bytes"] = wire.pushed;
  if (time) {
    json["exposed_ms"] = ms(time->exposed_s);
    json["tail_ms"] = ms(time->tail_s);
    json["waiting_share"] = time->waiting;
    json["idle_share"] = time->idle;
    if (time->clock_hz > 0) json["clock_mhz"] = 1e-6 * time->clock_hz;
  }
  if (checks.empty()) return json;
  std::int64_t wrong = 0;
  for (const TensorCheck& c : checks) wrong += c.pass == pass.pass ? c.differing : 0;
  json["wrong"] = wrong;
  return json;
}

Json records(const RunHeader& header, const StepOptions& options, const StepReport& report,
             const std::vector<TensorCheck>& checks) {
  Json all = Json::array();
  for (const PassRecord& pass : report.passes) {
    const auto time = time_figures(report, pass.pass);
    all.push_back(pass_record(header, options, pass, time, checks));
    for (const StageFigures& f : stage_figures(pass)) {
      all.push_back(stage_record(header, options, pass.pass, f, time));
    }
  }
  return all;
}

Json problem(const LayerData& layer) {
  return {{"tokens", layer.tokens},
          {"hidden", layer.hidden},
          {"intermediate", layer.intermediate},
          {"experts", layer.num_experts},
          {"topk", layer.topk},
          {"activation", name(layer.activation)},
          {"probs", name(layer.probs)},
          {"bias", layer.has_bias()},
          {"combine_groups", layer.combine_groups},
          {"combine_partials", name(layer.combine_partials)},
          {"shared_experts", layer.shared_experts},
          {"shared_gate", !layer.shared_probs.empty()}};
}

Json load(const StepReport& report) {
  const LoadFigures figures = load_figures(report);
  return {{"rows", figures.rows},
          {"remote_rows", figures.remote_rows},
          {"rows_per_expert_min", figures.min},
          {"rows_per_expert_median", figures.median},
          {"rows_per_expert_max", figures.max},
          {"rows_per_expert", report.rows_per_expert}};
}

Json row_pool(const PoolUse& pool) {
  if (pool.pages == 0) return nullptr;
  return {
      {"pages", pool.pages}, {"page_bytes", pool.page_bytes}, {"most_pages_held", pool.most_held}};
}

Json check_list(const std::vector<TensorCheck>& checks) {
  if (checks.empty()) return nullptr;
  Json list = Json::array();
  for (const TensorCheck& c : checks) {
    list.push_back({{"tensor", c.name},
                    {"elements", c.elements},
                    {"wrong", c.differing},
                    {"relative_l2", c.relative_l2},
                    {"limit", c.limit},
                    {"overflows", c.overflows},
                    {"ok", c.ok()}});
  }
  return list;
}

}  // namespace

void write_results(const std::string& path, const RunHeader& header, const LayerData& layer,
                   const StepOptions& options, const StepReport& report,
                   const std::vector<TensorCheck>& checks) {
  const Json file = {{"schema", "uniep-run-1"},
                     {"version", header.build.version},
                     {"commit", header.build.commit},
                     {"build", to_string(header.build)},
                     {"machine", to_string(header.machine)},
                     {"date", header.date},
                     {"command", header.command},
                     {"backend", options.backend},
                     {"link", header.link.empty() ? Json(nullptr) : Json(header.link)},
                     {"input", header.input},
                     {"problem", problem(layer)},
                     {"load", load(report)},
                     {"row_pool", row_pool(report.pool)},
                     {"repeat", report.steps},
                     {"interrupted", report.interrupted},
                     {"main_grad", options.main_grad ? "fp32" : "bf16"},
                     {"plan_ms", report.steps > 0 ? Json(ms(median(report.plan_seconds))) : Json()},
                     {"check", check_list(checks)},
                     {"records", records(header, options, report, checks)}};
  write_json(path, file);
}

}  // namespace uniep::tool
