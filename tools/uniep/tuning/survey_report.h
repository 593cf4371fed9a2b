#pragma once

#include <iosfwd>
#include <vector>

#include "common/record_json.h"
#include "tuning/survey.h"

namespace uniep::tool {

/// How well the model predicted each direction's points, of which each was run so many times.
void print_surveys(std::ostream& out, const std::vector<SurveyOfPass>& surveys, int rounds);

/// The record of a direction, as schema "uniep-tune-1" has it.
Json survey_json(const SurveyOfPass& survey);

}  // namespace uniep::tool
