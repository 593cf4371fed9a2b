#include "common/record_json.h"

#include <ostream>

#include "base/quantile.h"
#include "common/output_files.h"

namespace uniep::tool {
namespace {

double ms(double seconds) { return 1e3 * seconds; }

}  // namespace

std::optional<double> Record::efficiency() const {
  const double time = median(seconds);
  return floor_s && time > 0 ? std::optional(*floor_s / time) : std::nullopt;
}

Json record_json(const Record& r) {
  return {{"shape", r.shape},
          {"ranks", r.ranks},
          {"hosts", r.hosts},
          {"direction", r.direction},
          {"schedule", r.schedule},
          {"ms", ms(median(r.seconds))},
          {"p10", ms(quantile(r.seconds, 0.1))},
          {"p90", ms(quantile(r.seconds, 0.9))},
          {"baseline_ms", nullptr},
          {"floor_ms", r.floor_s ? Json(ms(*r.floor_s)) : Json(nullptr)},
          {"efficiency", or_null(r.efficiency())},
          {"wrong", or_null(r.wrong)}};
}

void write_json(const std::string& path, const Json& file) {
  // A file name may hold bytes that are not UTF-8.
  write_text(path, [&](std::ostream& out) {
    out << file.dump(1, ' ', false, Json::error_handler_t::replace) << '\n';
  });
}

}  // namespace uniep::tool
