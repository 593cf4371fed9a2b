#pragma once

#include <array>
#include <exception>
#include <span>
#include <streambuf>

#include "base/output_file.h"

namespace uniep::tool {

/// Lets a stream write to an OutputFile. A stream swallows what its buffer throws, so the first
/// failure is kept for `finish`.
class FileStreambuf : public std::streambuf {
 public:
  explicit FileStreambuf(OutputFile& file) : file_(file) { empty(); }

  /// Writes what is left; throws what failed.
  void finish() {
    write_out();
    if (failure_) std::rethrow_exception(failure_);
  }

 protected:
  int_type overflow(int_type c) override {
    if (!write_out()) return traits_type::eof();
    if (!traits_type::eq_int_type(c, traits_type::eof())) sputc(traits_type::to_char_type(c));
    return traits_type::not_eof(c);
  }
  int sync() override { return write_out() ? 0 : -1; }

 private:
  void empty() { setp(buffer_.data(), buffer_.data() + buffer_.size()); }

  bool write_out() {
    if (failure_) return false;
    try {
      file_.append(std::as_bytes(std::span(pbase(), pptr())));
    } catch (...) {
      failure_ = std::current_exception();
    }
    empty();
    return !failure_;
  }

  OutputFile& file_;
  std::array<char, 1 << 16> buffer_;
  std::exception_ptr failure_;
};

}  // namespace uniep::tool
