#pragma once

#include <string>

#include "uniep/stage.h"
#include "workload/synthetic.h"

namespace uniep::tool {

// What would take for ever, or more memory than there is, is refused before it is begun: estimated
// from the shape of a layer alone. `what` is the layer in an error: "--shape tiny". Each throws
// Error(kCapacity).

/// Throws if so many bytes are not free: better refused than killed half way.
void require_memory(const std::string& what, int ranks, double bytes);

/// Throws if making up the routing would take minutes.
void require_routable(const workload::ShapeSpec& spec, int ranks);

/// Throws if a pass on CPU ranks of this machine would take many minutes.
void require_short_passes(const std::string& what, const workload::ShapeSpec& spec, int ranks);

/// Throws if `uniep run --check` would take an hour, or more memory than is free beside what a run
/// of the layer itself takes.
void require_checkable(const std::string& what, const workload::ShapeSpec& spec, int ranks,
                       bool backward);

/// Seconds of a pass on CPU ranks of this machine, all of them together, at the speed of good
/// tiles: few layers are faster, many slower.
double usual_pass_seconds(const workload::ShapeSpec& spec, int ranks, Pass pass);

}  // namespace uniep::tool
