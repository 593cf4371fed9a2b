#include "uniep/c_api.h"

#include <cstring>
#include <regex>

#include "api/c_support.h"
#include "base/error_of.h"
#include "group/agreement.h"
#include "group/communicator_impl.h"
#include "group/joining.h"
#include "layer/options.h"
#include "uniep/version.h"

namespace {

thread_local std::string last_error;

bool names_rank(const std::string& sentence) {
  static const std::regex rank("rank [0-9]");
  return std::regex_search(sentence, rank);
}

const char* ranks_note_of(const uniep_group_config* config) {
  return config == nullptr ? nullptr : config->ranks_note;
}

/// The group that a config describes; of `config`, which outlives it. What is wrong with it, or
/// with where `check` looks, all ranks hear of.
template <class Check>
uniep::GroupOptions options_of(const uniep_group_config& config, const Check& check) {
  using namespace uniep::c_api;
  uniep::GroupOptions options{.rank = config.rank,
                              .size = config.size,
                              .device = config.device,
                              .all_gather = {},
                              .timeout_ms = config.timeout_ms};
  if (config.all_gather != nullptr) {
    options.all_gather = [&config](std::span<const std::byte> own, std::span<std::byte> all) {
      const int code = config.all_gather(config.context, own.data(), own.size(), all.data());
      require(code == 0, uniep::ErrorCode::kPeerFailed, "all_gather returned ", code,
              "; 0 means that it worked");
    };
  }
  try {
    check();
    options.backend = backend_of(config.backend);
    options.share_device = truth(config.share_device, "share_device");
  } catch (const uniep::Error& e) {
    uniep::refuse_group(options, e);
  }
  return options;
}

/// The options that a config describes, of a layer for `p`.
uniep::LayerOptions options_of(const uniep_layer_config& c, const uniep::Problem& p,
                               const uniep::Communicator& communicator) {
  using namespace uniep::c_api;
  const uniep::Backend backend = communicator.backend();
  const uniep::MemoryNeeds needs = uniep::Layer::memory_needs(p, backend, communicator.size());
  uniep::LayerOptions options{.record_timeline = truth(c.record_timeline, "record_timeline"),
                              .timeout_ms = c.timeout_ms};
  if (truth(c.erf_since_13_2, "erf_since_13_2")) options.erf = uniep::CudaErf::kSince13_2;
  if (c.schedule != nullptr) {
    options.schedule = uniep::parse_schedule(c.schedule, uniep::default_schedule(backend));
  }
  if (c.workspace != nullptr) {
    options.memory.workspace = elements<std::byte>(c.workspace, needs.workspace, "workspace");
  }
  if (c.symmetric != nullptr) {
    options.memory.symmetric = elements<std::byte>(c.symmetric, needs.symmetric, "symmetric");
  }
  for (int r = 0; c.peers != nullptr && r < communicator.size(); ++r) {
    options.memory.peers.push_back(static_cast<std::byte*>(c.peers[r]));
  }
  if (c.row_pool != nullptr) options.row_pool = c.row_pool->pool;
  if (c.release != nullptr) {
    options.memory.release = [release = c.release, context = c.release_context] {
      release(context);
    };
  }
  return options;
}

/// What is wrong with this rank's arguments the other ranks hear of, which make the layer.
[[noreturn]] void refuse_layer(const uniep::Communicator& communicator,
                               const uniep::LayerOptions& options, const uniep::Error& error) {
  uniep::agree(communicator.impl()->bootstrap(), uniep::wait_limit_ms(options), uniep::Stage::kPlan,
               "", [&] { throw error; });
  throw error;  // not reached: a rank that refuses makes all throw
}

}  // namespace

int uniep::c_api::failure(const Error& error, const char* ranks_note) {
  last_error = error.what();
  const bool has_note = ranks_note != nullptr && *ranks_note != '\0';
  if (has_note && names_rank(last_error)) last_error += cat(" (", ranks_note, ")");
  return 1 + static_cast<int>(error.code());
}

using namespace uniep::c_api;

const char* uniep_version(void) { return UNIEP_VERSION_STRING; }

const char* uniep_last_error(void) { return last_error.c_str(); }

int uniep_has_cuda(void) {
#ifdef UNIEP_HAS_CUDA
  return 1;
#else
  return 0;
#endif
}

int uniep_group_create(const uniep_group_config* config, uniep_group** group) {
  const char* const note = ranks_note_of(config);
  return guarded(note, [&] {
    require_given(config, "config");
    const auto check = [&] { require_given(group, "group"); };
    *group = new uniep_group{uniep::Communicator::from_callbacks(options_of(*config, check)),
                             note == nullptr ? "" : note};
  });
}

int uniep_group_find_hosts(const uniep_group_config* config, int32_t* hosts, int32_t* local_ranks) {
  return guarded(ranks_note_of(config), [&] {
    require_given(config, "config");
    const auto check = [&] {
      require_given(hosts, "hosts");
      require_given(local_ranks, "local_ranks");
    };
    const uniep::RankLayout layout = uniep::Communicator::find_hosts(options_of(*config, check));
    *hosts = layout.hosts;
    *local_ranks = layout.local_ranks;
  });
}

int uniep_group_layout(const uniep_group* group, int32_t* hosts, int32_t* local_ranks) {
  return guarded_of(group, "group", [&] {
    require_given(hosts, "hosts");
    require_given(local_ranks, "local_ranks");
    const uniep::RankLayout layout = group->communicator.layout();
    *hosts = layout.hosts;
    *local_ranks = layout.local_ranks;
  });
}

void uniep_group_destroy(uniep_group* group) { delete group; }

int uniep_needs(const uniep_problem* problem, int32_t backend, int32_t ranks,
                uniep_memory_needs* needs) {
  return guarded([&] {
    require_given(needs, "needs");
    *needs = c_needs(uniep::Layer::memory_needs(problem_of(problem), backend_of(backend), ranks));
  });
}

int uniep_layer_create(uniep_group* group, const uniep_problem* problem,
                       const uniep_layer_config* config, uniep_layer** layer) {
  return guarded_of(group, "group", [&] {
    const uniep::Communicator& communicator = group->communicator;
    communicator.impl()->usage.require_own_process();
    const uniep::CollectiveCall turn(*communicator.impl());
    const uniep_layer_config c = config != nullptr ? *config : uniep_layer_config{};
    uniep::Problem p;
    uniep::LayerOptions options{.timeout_ms = c.timeout_ms};
    try {
      require_given(layer, "layer");
      p = problem_of(problem);
      options = options_of(c, p, communicator);
    } catch (...) {
      refuse_layer(communicator, options, uniep::current_error());
    }
    *layer = new uniep_layer(p, *group, options);
  });
}

int uniep_layer_needs(uniep_layer* layer, int64_t rows, uniep_memory_needs* needs) {
  return guarded_of(layer, "layer", [&] {
    require_given(needs, "needs");
    *needs = c_needs(layer->needs_of_call(rows));
  });
}

void uniep_layer_destroy(uniep_layer* layer) { delete layer; }

int uniep_layer_schedule(uniep_layer* layer, int32_t pass, char* text, size_t size) {
  return guarded_of(layer, "layer", [&] {
    require_given(text, "text");
    require(pass == 0 || pass == 1, ErrorCode::kInvalidArgument, "pass is ", pass,
            "; 0 (forward) and 1 (backward) are accepted");
    const std::string all =
        to_string(layer->layer.schedule(pass == 0 ? Pass::kForward : Pass::kBackward));
    require(all.size() < size, ErrorCode::kInvalidArgument, "size is ", size, "; ", all.size() + 1,
            " or more are accepted");
    std::memcpy(text, all.c_str(), all.size() + 1);
  });
}

int uniep_layer_synchronize(uniep_layer* layer) {
  return guarded_of(layer, "layer", [&] {
    const uniep::Usage::Call turn(layer->usage);
    layer->layer.synchronize();
  });
}
