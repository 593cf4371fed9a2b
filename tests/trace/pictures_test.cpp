// Every kind of picture for random inputs, ordinary and extreme, as picture_check.h reads them.

#include <gtest/gtest.h>

#include <fstream>

#include "support/cases.h"
#include "support/temporary_folder.h"
#include "trace/picture_check.h"
#include "trace/random_pictures.h"

namespace uniep::trace {
namespace {

/// So that failures can be looked at: UNIEP_PICTURES=FOLDER keeps them all.
void keep(const std::string& name, const std::string& svg) {
  const char* folder = std::getenv("UNIEP_PICTURES");
  if (folder != nullptr) std::ofstream(cat(folder, '/', name, ".svg")) << svg;
}

template <class Draw>
void expect_no_faults(const std::string& kind, int count, const Draw& draw) {
  for (int i = 0; i < testing::cases(count); ++i) {
    RandomPictures random(static_cast<std::uint64_t>(i));
    const std::string svg = draw(random);
    keep(cat(kind, '_', i), svg);
    ASSERT_EQ(picture_faults(svg), "") << kind << ", seed " << i;
  }
}

TEST(Pictures, OfRuns) {
  expect_no_faults("run", 150, [](RandomPictures& random) { return draw_plot(random.run()); });
}

TEST(Pictures, OfPredictions) {
  expect_no_faults("scaling", 300,
                   [](RandomPictures& random) { return tool::draw_scaling(random.scaling()); });
}

TEST(Pictures, OfSurveys) {
  expect_no_faults("survey", 150, [](RandomPictures& random) {
    return tool::draw_survey(random.page(), random.survey());
  });
}

TEST(Pictures, OfTheDocs) {
  for (const char* name : {"cuda_step", "model_cpu", "model_h200", "overlap_sequential",
                           "overlap_single", "scaling", "step"}) {
    const std::string path = cat(UNIEP_DATA_DIR, "/../docs/images/", name, ".svg");
    EXPECT_EQ(picture_faults(testing::file_text(path)), "") << path;
  }
}

bool has(const std::string& svg, const std::string& text) {
  return svg.find(text) != std::string::npos;
}

tool::ScalingInput two_directions() {
  return {.page = {.title = "t", .notes = {}, .schedule = {}},
          .ranks = {4, 8, 16},
          .curves = {{"forward", {1e-3, 1e-3, 2e-3}, {1e-4, 1e-4, 1e-3}},
                     {"backward", {2e-3, 2e-3, 8e-3}, {1e-4, 1e-4, 5e-3}}},
          .gpus_per_node = 8,
          .between_nodes = "a NIC"};
}

/// Of the columns with this tooltip: of its exposed part and of the rest.
std::vector<double> heights(const std::string& svg, const std::string& tooltip) {
  std::vector<double> found;
  for (const XmlElement& e : XmlReader::read(svg).children) {
    const bool named = !e.children.empty() && e.children[0].text.starts_with(tooltip);
    if (e.name == "rect" && named) found.push_back(std::stod(e.attributes.at("height")));
  }
  return found;
}

TEST(Scaling, DrawsDirectionsOnOneScale) {
  const std::string svg = tool::draw_scaling(two_directions());
  const auto forward = heights(svg, "forward, 8 ranks"),
             backward = heights(svg, "backward, 8 ranks");
  ASSERT_EQ(forward.size(), 2u);
  ASSERT_EQ(backward.size(), 2u);
  EXPECT_NEAR(2 * (forward[0] + forward[1]), backward[0] + backward[1], 0.1);
  EXPECT_NEAR(forward[0] / (forward[0] + forward[1]), 0.1, 0.01) << "of this exposed";
}

TEST(Scaling, SaysWhatIsInANode) {
  tool::ScalingInput input = two_directions();
  const std::string cluster = tool::draw_scaling(input);
  for (const char* words : {">1 node<", ">2 nodes<", "up to 8 of them in a node",
                            "several nodes, connected by a NIC"}) {
    EXPECT_TRUE(has(cluster, words)) << words;
  }
  input.gpus_per_node = 0;
  EXPECT_FALSE(has(tool::draw_scaling(input), "node"));
}

TEST(Survey, SaysHowWellPredictionsAgree) {
  std::vector<tool::SurveyPoint> points(4);
  for (std::size_t i = 0; i < points.size(); ++i) {
    points[i].predicted_s = 1e-3 * static_cast<double>(i + 1);
    points[i].measured_s = 1.25 * points[i].predicted_s;
  }
  const std::string svg = tool::draw_survey({}, points);
  for (const char* words : {">4<", ">1.000<", ">20.0 %<", ">predicted = measured<",
                            ">measured, ms<", ">predicted, ms<"}) {
    EXPECT_TRUE(has(svg, words)) << words;
  }
  EXPECT_TRUE(has(tool::draw_survey({}, {}), "no point was measured"));
}

}  // namespace
}  // namespace uniep::trace
