#pragma once

#include <string>
#include <vector>

#include "tune/model/fit.h"
#include "tune/model/machine_profile.h"
#include "tune/model/task_cost.h"

namespace uniep::tune {

/// What a fit says, and how far it is from what was measured: relative errors.
struct FitReport {
  std::string what;
  std::size_t samples = 0;
  double mean_error = 0;
  double worst_error = 0;
  std::string result;
};

/// The sizes that a product's time is a sum over, in the order of GemmCost.
std::vector<double> product_terms(double m, double n, double k);
/// The sizes that a data-moving task's time is a sum over, in the order of MoveCost.
std::vector<double> move_terms(const MoveSize& size);

/// Times of products of one stage.
struct ProductObservations {
  Stage stage = Stage::kFc1;
  int tile_n = 0;  ///< of GemmCost
  std::vector<Observation> observations;
};
std::vector<GemmCost> fit_products(const std::vector<ProductObservations>& products,
                                   std::vector<FitReport>& reports);

MoveCost fit_moves(const std::string& what, const std::vector<Observation>& observations,
                   std::vector<FitReport>& reports);

/// A tile that one worker computed.
struct TileSample {
  Stage stage = Stage::kFc1;
  int tile_m = 0;
  int tile_n = 0;
  ProductSize size;
  double seconds = 0;
};
/// Costs of tiles, and `padding`, as far as whole and partial tiles of one size tell them apart:
/// of tiles that are nearly all whole, only what grows with k and what does not.
struct TileCosts {
  double padding = 0;
  std::vector<GemmCost> gemms;
};
TileCosts fit_tiles(const std::vector<TileSample>& tiles, int k_step,
                    std::vector<FitReport>& reports);

/// A transfer of so many bytes, and what it took.
struct Transfer {
  double bytes = 0;
  double seconds = 0;
};
/// Seconds that a further byte takes, not below 0: the slope of a line through the transfers. Where
/// it begins is left free, for what is still under way at the end of a stage is not waited for.
double fit_byte(const std::string& what, const std::vector<Transfer>& transfers,
                std::vector<FitReport>& reports);

}  // namespace uniep::tune
