#include "tuning/survey_report.h"

#include <ostream>

#include "base/check.h"
#include "common/table.h"

namespace uniep::tool {

void print_surveys(std::ostream& out, const std::vector<SurveyOfPass>& surveys, int rounds) {
  using enum Table::Align;
  Table table({kLeft, kRight, kRight, kRight, kRight, kRight});
  table.header({"", "", "rank", "median", "90 %", "best over"});
  table.header({"direction", "points", "correlation", "error", "error", "model's pick"});
  for (const SurveyOfPass& survey : surveys) {
    const Agreement a = agreement_of(survey.points);
    table.row({name(survey.pass), cat(survey.points.size()), formatted("%.3f", a.rank_correlation),
               formatted("%.1f %%", 100 * a.median_error), formatted("%.1f %%", 100 * a.p90_error),
               formatted("%.3f", a.pick)});
  }
  out << "#\n"
      << comment(cat("random points, or all of a space that has no more, the least of ", rounds,
                     " passes each, beside what the model says"))
      << table;
}

Json survey_json(const SurveyOfPass& survey) {
  const Agreement a = agreement_of(survey.points);
  Json points = Json::array();
  for (const SurveyPoint& p : survey.points) {
    points.push_back({{"schedule", to_string(p.schedule)},
                      {"predicted_ms", 1e3 * p.predicted_s},
                      {"ms", 1e3 * p.measured_s}});
  }
  return {{"direction", name(survey.pass)},
          {"rank_correlation", a.rank_correlation},
          {"median_error", a.median_error},
          {"p90_error", a.p90_error},
          {"pick", a.pick},
          {"points", points}};
}

}  // namespace uniep::tool
