#include "api/c_support.h"

using namespace uniep::c_api;

int uniep_row_pool_create(uniep_group* group, const uniep_problem* problem, int64_t bytes,
                          void* memory, uniep_row_pool** pool) {
  return guarded_of(group, "group", [&] {
    require_given(pool, "pool");
    require(memory == nullptr || bytes > 0, ErrorCode::kInvalidArgument, "bytes is ", bytes,
            ", and memory is given; as many bytes as that has are accepted");
    const uniep::RowPoolOptions options{.bytes = bytes, .memory = scratch(memory, bytes)};
    *pool = new uniep_row_pool{uniep::RowPool(problem_of(problem), group->communicator, options)};
  });
}

void uniep_row_pool_destroy(uniep_row_pool* pool) { delete pool; }

int uniep_row_pool_ask(uniep_row_pool* pool, uniep_row_pool_state* state) {
  return guarded([&] {
    require_given(pool, "pool");
    require_given(state, "state");
    const uniep::RowPool& p = pool->pool;
    *state = {.pages = p.pages(),
              .page_bytes = p.page_bytes(),
              .bytes = p.bytes(),
              .free_pages = p.free_pages(),
              .fewest_free_pages = p.fewest_free_pages()};
  });
}
