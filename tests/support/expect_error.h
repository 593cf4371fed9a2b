#pragma once

#include <gtest/gtest.h>

#include <string>

#include "support/states.h"
#include "uniep/error.h"

namespace uniep::testing {

/// `call` throws Error(code) with a sentence that states what this one does.
template <class Call>
void expect_error(ErrorCode code, const std::string& sentence, Call&& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected: " << sentence;
  } catch (const Error& e) {
    EXPECT_STATES(e.what(), sentence);
    EXPECT_EQ(static_cast<int>(e.code()), static_cast<int>(code)) << sentence;
  }
}

template <class Call>
void expect_invalid(const std::string& sentence, Call&& call) {
  expect_error(ErrorCode::kInvalidArgument, sentence, call);
}

}  // namespace uniep::testing
