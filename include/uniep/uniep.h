#pragma once

/// Everything public. docs/api.md has an example, docs/architecture.md shows what is behind it.
#include "uniep/backend.h"
#include "uniep/bf16.h"
#include "uniep/communicator.h"
#include "uniep/error.h"
#include "uniep/layer.h"
#include "uniep/overflow.h"
#include "uniep/problem.h"
#include "uniep/routing_plan.h"
#include "uniep/row_pool.h"
#include "uniep/schedule.h"
#include "uniep/stage.h"
#include "uniep/timeline.h"
#include "uniep/tune.h"
#include "uniep/version.h"
