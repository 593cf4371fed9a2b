#pragma once

#include <string>
#include <vector>

#include "trace/page.h"
#include "tuning/survey.h"

namespace uniep::tool {

/// One self-contained SVG document: a dot a point, predicted over measured time, and beside it how
/// well the two agree.
std::string draw_survey(const trace::PageText& page, const std::vector<SurveyPoint>& points);

}  // namespace uniep::tool
