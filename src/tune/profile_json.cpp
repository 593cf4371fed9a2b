// The file format of machine profiles. Every key is required, so that a typing error does not pass
// for a default.
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "tune/machine_profile.h"
#include "tune/shipped_files.h"

namespace uniep::tune {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kSchema = "uniep-profile-1";

Json to_json(const Curve& curve) {
  Json points = Json::array();
  for (const Curve::Point& p : curve.points) points.push_back({p.at, p.value});
  return points;
}

Curve curve_from(const Json& json) {
  Curve curve;
  for (const Json& point : json) {
    curve.points.push_back({point.at(0).get<double>(), point.at(1).get<double>()});
  }
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

MoveCost move_cost_from(const Json& json) {
  const MoveCost cost{.fixed = json.at("fixed_s").get<double>(),
                      .per_item = json.at("per_item_s").get<double>(),
                      .per_byte = json.at("per_byte_s").get<double>(),
                      .alone = json.value("alone", 1.0),
                      .crowd = json.value("crowd", 0.0)};
  require(cost.alone > 0 && cost.alone <= 1, ErrorCode::kIo, "alone is ", cost.alone,
          "; more than 0 and at most 1 is accepted");
  require(cost.crowd >= 0, ErrorCode::kIo, "crowd is ", cost.crowd, "; 0 or more is accepted");
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
  throw Error(ErrorCode::kIo, cat("there is no stage '", text, "'"));
}

GemmCost gemm_cost_from(const Json& json) {
  return {stage_named(json.at("stage").get<std::string>()),
          json.at("tile_n").get<int>(),
          json.at("fixed_s").get<double>(),
          json.at("per_mnk_s").get<double>(),
          json.at("per_mk_s").get<double>(),
          json.at("per_nk_s").get<double>(),
          json.at("per_mn_s").get<double>()};
}

Backend backend_named(const std::string& text) {
  for (const Backend b : {Backend::kCpu, Backend::kCuda}) {
    if (text == name(b)) return b;
  }
  throw Error(ErrorCode::kIo, cat("there is no backend '", text, "'"));
}

LinkProfile link_from(const Json& json) {
  return {.bytes_per_s = json.at("bytes_per_s").get<double>(),
          .latency_s = json.at("latency_s").get<double>(),
          .exclusive = json.at("exclusive").get<bool>(),
          .pull_bytes_per_s = json.at("pull_bytes_per_s").get<double>(),
          .push = curve_from(json.at("push_by_segment_bytes"))};
}

MachineProfile profile_from(const Json& json) {
  const auto schema = json.at("schema").get<std::string>();
  require(schema == kSchema, ErrorCode::kIo, "its schema is '", schema, "'; ", kSchema,
          " is accepted");
  MachineProfile p;
  p.name = json.at("name").get<std::string>();
  p.backend = backend_named(json.at("backend").get<std::string>());
  p.device = json.at("device").get<std::string>();
  p.source = json.at("source").get<std::string>();
  p.cores = json.at("cores").get<int>();
  p.workers = json.at("workers").get<int>();
  p.lanes = json.at("lanes").get<int>();
  p.push_depth = json.at("push_depth").get<int>();
  p.padding = json.at("padding").get<double>();
  p.k_step = json.at("k_step").get<int>();
  p.cache_bytes = json.at("cache_bytes").get<double>();
  for (const Json& gemm : json.at("gemms")) p.gemms.push_back(gemm_cost_from(gemm));
  p.dispatch = move_cost_from(json.at("dispatch"));
  p.reduce = move_cost_from(json.at("reduce"));
  p.enter = move_cost_from(json.at("enter"));
  p.launch_s = json.at("launch_s").get<double>();
  p.draw_s = json.value("draw_s", 0.0);  // came later than the schema
  p.beside_link = json.at("beside_link").get<double>();
  p.link = link_from(json.at("link"));
  const Json& wake = json.at("wake");
  p.wake = {wake.at("flag_s").get<double>(), wake.at("first_sleep_s").get<double>(),
            wake.at("longest_sleep_s").get<double>(), wake.at("sleep_slack_s").get<double>()};
  require(p.lanes >= 1 && p.k_step >= 1 && (p.cores >= 1 || p.workers >= 1), ErrorCode::kIo,
          "lanes, k_step, and cores or workers must be at least 1");
  return p;
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
    return profile_from(Json::parse(text));
  } catch (const Json::exception& e) {
    throw Error(ErrorCode::kIo, cat("profile ", origin, " cannot be used: ", e.what(),
                                    "; what `uniep profile` writes is accepted"));
  } catch (const Error& e) {
    throw Error(ErrorCode::kIo, cat("profile ", origin, " cannot be used: ", e.what()));
  }
}

MachineProfile read_profile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  require(file.good(), ErrorCode::kIo, "cannot read profile ", path,
          "; a file that `uniep profile` wrote is accepted");
  return profile_from_json(std::string{std::istreambuf_iterator<char>(file), {}}, path);
}

MachineProfile shipped_profile(std::string_view name) {
  std::string known;
  for (const ShippedFile& file : shipped_profiles()) {
    if (file.name == name) return profile_from_json(file.text, cat("shipped ", file.name));
    known += cat(known.empty() ? "" : ", ", file.name);
  }
  throw Error(ErrorCode::kInvalidArgument,
              cat("there is no shipped profile '", name, "'; ", known, " are accepted"));
}

}  // namespace uniep::tune
