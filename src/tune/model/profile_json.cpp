// The file format of machine profiles. Every key is required, but for those that came later than
// the schema (draw_s, alone, crowd), and no other is accepted, so that a typing error does not pass
// for a default. Every value is checked: a simulation under a profile that was read ends.
#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/files.h"
#include "base/quotes.h"
#include "tune/files/json_fields.h"
#include "tune/files/shipped_files.h"
#include "tune/model/machine_profile.h"

namespace uniep::tune {
namespace {

constexpr const char* kSchema = "uniep-profile-1";

// A rank's share of these is memory, so they end where those of schedules do, or well above what
// machines have.
constexpr int kMostCores = 4096;
constexpr int kMostWorkers = 1024;
constexpr int kMostLanes = 64;
constexpr int kMostPushes = 256;
constexpr int kMostTileN = 4096;
constexpr int kMostKStep = 65536;

// Sums of times must stay finite, and a sleep must bring a clock forward that shows many of them.
constexpr Accepted kSeconds{[](double v) { return v >= 0 && v <= 1000; },
                            "0 to 1000 seconds are accepted"};
constexpr Accepted kSleep{[](double v) { return v == 0 || (v >= 1e-6 && v <= 1000); },
                          "0, or 1e-6 to 1000 seconds, are accepted"};
constexpr Accepted kRate{[](double v) { return v >= 1 && v <= 1e18; },
                         "1 to 1e18 bytes/s are accepted"};
constexpr Accepted kRateOrNone{[](double v) { return v == 0 || (v >= 1 && v <= 1e18); },
                               "0, or 1 to 1e18 bytes/s, are accepted"};
constexpr Accepted kShare{[](double v) { return v >= 0 && v <= 1; }, "0 to 1 is accepted"};
constexpr Accepted kSomeShare{[](double v) { return v > 0 && v <= 1; },
                              "more than 0 and at most 1 is accepted"};
constexpr Accepted kFactor{[](double v) { return v > 0 && v <= 1000; },
                           "more than 0 and at most 1000 is accepted"};
constexpr Accepted kAmount{[](double v) { return v >= 0 && v <= 1e18; }, "0 to 1e18 is accepted"};

Json to_json(const Curve& curve) {
  Json points = Json::array();
  for (const Curve::Point& p : curve.points) points.push_back({p.at, p.value});
  return points;
}

Curve rates_from(const Json& json, const std::string& path) {
  Curve curve;
  for (const Json& point : list_from(json, path)) {
    const std::string here = cat(path, '[', curve.points.size(), ']');
    require(point.is_array() && point.size() == 2, ErrorCode::kIo, here, " is ", shown(point),
            "; a list of bytes and bytes/s is accepted");
    curve.points.push_back(
        {number_from(point[0], here + "[0]", kAmount), number_from(point[1], here + "[1]", kRate)});
  }
  const auto falls =
      std::ranges::adjacent_find(curve.points, std::greater_equal{}, &Curve::Point::at);
  require(falls == curve.points.end(), ErrorCode::kIo, path,
          " does not rise; pairs with more bytes from each to the next are accepted");
  return curve;
}

Json to_json(const MoveCost& c) {
  Json json{{"fixed_s", c.fixed}, {"per_item_s", c.per_item}, {"per_byte_s", c.per_byte}};
  if (c.crowd > 0) {
    json["alone"] = c.alone;
    json["crowd"] = c.crowd;
  }
  return json;
}

MoveCost move_cost_from(Fields fields) {
  const MoveCost cost{.fixed = fields.number("fixed_s", kSeconds),
                      .per_item = fields.number("per_item_s", kSeconds),
                      .per_byte = fields.number("per_byte_s", kSeconds),
                      .alone = fields.number_or("alone", kSomeShare, 1),
                      .crowd = fields.number_or("crowd", kAmount, 0)};
  fields.refuse_others();
  return cost;
}

Json to_json(const GemmCost& c) {
  return {{"stage", name(c.stage)}, {"tile_n", c.tile_n},   {"fixed_s", c.fixed},
          {"per_mnk_s", c.per_mnk}, {"per_mk_s", c.per_mk}, {"per_nk_s", c.per_nk},
          {"per_mn_s", c.per_mn}};
}

Stage stage_named(const std::string& text) {
  for (int i = 0; i < kNumStages; ++i) {
    if (text == name(static_cast<Stage>(i))) return static_cast<Stage>(i);
  }
  throw Error(ErrorCode::kIo, cat("there is no stage ", in_quotes(text)));
}

GemmCost gemm_cost_from(Fields fields) {
  const GemmCost cost{.stage = stage_named(fields.text("stage")),
                      .tile_n = fields.integer("tile_n", 0, kMostTileN),
                      .fixed = fields.number("fixed_s", kSeconds),
                      .per_mnk = fields.number("per_mnk_s", kSeconds),
                      .per_mk = fields.number("per_mk_s", kSeconds),
                      .per_nk = fields.number("per_nk_s", kSeconds),
                      .per_mn = fields.number("per_mn_s", kSeconds)};
  fields.refuse_others();
  return cost;
}

std::vector<GemmCost> gemm_costs_from(const Json& json) {
  std::vector<GemmCost> costs;
  for (const Json& gemm : list_from(json, "gemms")) {
    costs.push_back(gemm_cost_from({gemm, cat("gemms[", costs.size(), "]")}));
  }
  return costs;
}

Backend backend_named(const std::string& text) {
  for (const Backend b : {Backend::kCpu, Backend::kCuda}) {
    if (text == name(b)) return b;
  }
  throw Error(ErrorCode::kIo, cat("there is no backend ", in_quotes(text)));
}

LinkProfile link_from(Fields fields) {
  const char* push = "push_by_segment_bytes";
  LinkProfile link{.bytes_per_s = fields.number("bytes_per_s", kRateOrNone),
                   .latency_s = fields.number("latency_s", kSeconds),
                   .exclusive = fields.flag("exclusive"),
                   .pull_bytes_per_s = fields.number("pull_bytes_per_s", kRateOrNone),
                   .push = rates_from(fields.at(push), fields.path(push))};
  fields.refuse_others();
  return link;
}

WakeProfile wake_from(Fields fields) {
  const WakeProfile wake{.flag_s = fields.number("flag_s", kSeconds),
                         .first_sleep_s = fields.number("first_sleep_s", kSleep),
                         .longest_sleep_s = fields.number("longest_sleep_s", kSeconds),
                         .sleep_slack_s = fields.number("sleep_slack_s", kSeconds)};
  fields.refuse_others();
  require(wake.longest_sleep_s >= wake.first_sleep_s, ErrorCode::kIo,
          fields.path("longest_sleep_s"), " is ", wake.longest_sleep_s, "; at least ",
          fields.path("first_sleep_s"), ", ", wake.first_sleep_s, ", is accepted");
  return wake;
}

void read_machine(Fields& file, MachineProfile& p) {
  p.name = file.text("name");
  p.backend = backend_named(file.text("backend"));
  p.device = file.text("device");
  p.source = file.text("source");
  p.cores = file.integer("cores", 0, kMostCores);
  p.workers = file.integer("workers", 0, kMostWorkers);
  require(p.cores >= 1 || p.workers >= 1, ErrorCode::kIo,
          "cores and workers are 0; at least 1 of one of them is accepted");
  p.lanes = file.integer("lanes", 1, kMostLanes);
  p.push_depth = file.integer("push_depth", -1, kMostPushes);
  p.padding = file.number("padding", kShare);
  p.k_step = file.integer("k_step", 1, kMostKStep);
  p.cache_bytes = file.number("cache_bytes", kAmount);
}

void read_costs(Fields& file, MachineProfile& p) {
  p.gemms = gemm_costs_from(file.at("gemms"));
  p.dispatch = move_cost_from(file.object("dispatch"));
  p.reduce = move_cost_from(file.object("reduce"));
  p.enter = move_cost_from(file.object("enter"));
  p.launch_s = file.number("launch_s", kSeconds);
  p.draw_s = file.number_or("draw_s", kSeconds, 0);
  p.beside_link = file.number("beside_link", kFactor);
  p.link = link_from(file.object("link"));
  p.wake = wake_from(file.object("wake"));
}

MachineProfile profile_from(const Json& json) {
  Fields file(json, "");
  const std::string schema = file.text("schema");
  require(schema == kSchema, ErrorCode::kIo, "its schema is ", in_quotes(schema), "; ", kSchema,
          " is accepted");
  MachineProfile profile;
  read_machine(file, profile);
  read_costs(file, profile);
  file.refuse_others();
  return profile;
}

}  // namespace

double Curve::operator()(double at) const {
  if (points.empty()) return 0;
  if (at <= points.front().at) return points.front().value;
  for (std::size_t i = 1; i < points.size(); ++i) {
    const Point& a = points[i - 1];
    const Point& b = points[i];
    if (at <= b.at) return a.value + (b.value - a.value) * (at - a.at) / (b.at - a.at);
  }
  return points.back().value;
}

std::string profile_to_json(const MachineProfile& p) {
  Json gemms = Json::array();
  for (const GemmCost& cost : p.gemms) gemms.push_back(to_json(cost));
  const Json file = {{"schema", kSchema},
                     {"name", p.name},
                     {"backend", name(p.backend)},
                     {"device", p.device},
                     {"source", p.source},
                     {"cores", p.cores},
                     {"workers", p.workers},
                     {"lanes", p.lanes},
                     {"push_depth", p.push_depth},
                     {"padding", p.padding},
                     {"k_step", p.k_step},
                     {"cache_bytes", p.cache_bytes},
                     {"gemms", gemms},
                     {"dispatch", to_json(p.dispatch)},
                     {"reduce", to_json(p.reduce)},
                     {"enter", to_json(p.enter)},
                     {"launch_s", p.launch_s},
                     {"draw_s", p.draw_s},
                     {"beside_link", p.beside_link},
                     {"link",
                      {{"bytes_per_s", p.link.bytes_per_s},
                       {"latency_s", p.link.latency_s},
                       {"exclusive", p.link.exclusive},
                       {"pull_bytes_per_s", p.link.pull_bytes_per_s},
                       {"push_by_segment_bytes", to_json(p.link.push)}}},
                     {"wake",
                      {{"flag_s", p.wake.flag_s},
                       {"first_sleep_s", p.wake.first_sleep_s},
                       {"longest_sleep_s", p.wake.longest_sleep_s},
                       {"sleep_slack_s", p.wake.sleep_slack_s}}}};
  return file.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

MachineProfile profile_from_json(std::string_view text, const std::string& origin) {
  try {
    return profile_from(parse_json(text));
  } catch (const Error& e) {
    throw Error(ErrorCode::kIo, cat("profile ", origin, " cannot be used: ", e.what()));
  }
}

MachineProfile read_profile(const std::string& path) {
  std::optional<std::string> text;
  try {
    text = read_text(path);
  } catch (const Error& e) {
    throw Error(e.code(), cat("cannot read profile ", e.what()));
  }
  require(text.has_value(), ErrorCode::kIo, "cannot read profile ", display_name(path),
          ": there is none; a file that `uniep profile` wrote is accepted");
  return profile_from_json(*text, display_name(path));
}

MachineProfile shipped_profile(std::string_view name) {
  std::string known;
  for (const ShippedFile& file : shipped_profiles()) {
    if (file.name == name) return profile_from_json(file.text, cat("shipped ", file.name));
    known += cat(known.empty() ? "" : ", ", file.name);
  }
  throw Error(ErrorCode::kInvalidArgument,
              cat("there is no shipped profile ", in_quotes(name), "; ", known, " are accepted"));
}

}  // namespace uniep::tune
