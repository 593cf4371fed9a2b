// Rows of slots that are added up by uniep_add_rows.
#include "api/c_steps.h"
#include "support/cases.h"
#include "support/row_sums_case.h"

namespace uniep::testing {
namespace {

TEST(AddRows, TheSumsOfALayerThatAddsThemUp) {
  for (int seed = 0; seed < cases(200); ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    const RowSumsCase rows(rng);
    std::vector<bf16> out(rows.sums.size(), bf16{0x7fff});
    uniep_rows_call call = rows.call();
    call.out = out.data();
    ASSERT_NO_FATAL_FAILURE(expect_ok(uniep_add_rows(&call)));
    expect_same_bits(out, rows.sums, "sums", cat("seed ", seed));
  }
}

TEST(AddRows, OfARowThatThereIsNotNaN) {
  const std::vector<bf16> rows(8, to_bf16(1));
  const std::int32_t ids[] = {0, 0, 0, -1};
  for (const std::int64_t lost : {std::int64_t{2}, std::int64_t{-1}, INT64_MAX, INT64_MIN}) {
    const std::int64_t row[] = {0, lost, 0, lost};
    std::vector<bf16> out(16);
    uniep_rows_call call{};
    call.tokens = 2, call.hidden = 8, call.topk = 2, call.num_experts = call.combine_groups = 1;
    call.ids = ids, call.row = row, call.rows = rows.data(), call.num_rows = 1;
    call.more = rows.data(), call.num_more = 1;
    call.out = out.data();
    ASSERT_NO_FATAL_FAILURE(expect_ok(uniep_add_rows(&call)));
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(std::isnan(to_float(out[static_cast<std::size_t>(i)]))) << lost;
      EXPECT_EQ(out[static_cast<std::size_t>(8 + i)], to_bf16(1)) << "the slot is left out";
    }
  }
}

TEST(AddRows, RefusesWhatItCannotAddUp) {
  Rng rng(1);
  const RowSumsCase rows(rng);
  std::vector<bf16> out(rows.sums.size());
  const auto refused = [&](auto change, const std::string& sentence) {
    uniep_rows_call call = rows.call();
    call.out = out.data();
    change(call);
    expect_refused(uniep_add_rows(&call), sentence);
  };
  ASSERT_GT(rows.layer.tokens, 0);
  expect_refused(uniep_add_rows(nullptr), "call is NULL; an address is accepted");
  refused([](auto& c) { c.backend = 2; }, "backend is 2; 0 (cpu) and 1 (cuda) are accepted");
  refused([](auto& c) { c.tokens = -1; }, "call.tokens is -1; 0 to 2147483647 is accepted");
  refused([](auto& c) { c.hidden = 12; }, "call.hidden is 12; a multiple of 8 is accepted");
  refused([](auto& c) { c.hidden = 0; }, "call.hidden is 0; 8 to 1048576 is accepted");
  refused([](auto& c) { c.topk = 17; }, "call.topk is 17; 1 to 16 is accepted");
  refused([](auto& c) { c.num_experts = 0; }, "call.num_experts is 0; 1 to 2147483647 is accepted");
  refused([](auto& c) { c.num_experts = 6, c.combine_groups = 4; },
          "call.combine_groups is 4; a divisor of num_experts=6 from 1 on is accepted");
  refused([](auto& c) { c.combine_partials = 2; },
          "call.combine_partials is 2; 0 and 1 are accepted");
  for (const std::int64_t count : {std::int64_t{-1}, INT64_MAX}) {
    const std::string accepted = cat(" is ", count, "; 0 to 1099511627776 is accepted");
    refused([&](auto& c) { c.num_rows = count; }, "call.num_rows" + accepted);
    refused([&](auto& c) { c.num_more = count; }, "call.num_more" + accepted);
  }
  refused([](auto& c) { c.ids = nullptr; }, "call.ids is NULL; an address is accepted");
  refused([](auto& c) { c.row = nullptr; }, "call.row is NULL; an address is accepted");
  refused([](auto& c) { c.num_rows = 1, c.rows = nullptr; },
          "call.rows is NULL; an address is accepted");
  refused([](auto& c) { c.num_more = 1, c.more = nullptr; },
          "call.more is NULL; an address is accepted");
  refused([](auto& c) { c.out = nullptr; }, "call.out is NULL; an address is accepted");
  for (const std::int32_t id : {rows.layer.num_experts, INT32_MAX - 1, INT32_MAX}) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(rows.call().tokens * rows.call().topk));
    ids.back() = id;
    refused([&](auto& c) { c.ids = ids.data(); },
            cat("call.ids has ", id, " at slot ", ids.size() - 1,
                "; less than num_experts=", rows.layer.num_experts, " is accepted"));
  }
}

}  // namespace
}  // namespace uniep::testing
