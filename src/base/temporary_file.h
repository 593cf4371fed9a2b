#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace uniep {

/// A name beside `target` that is removed with the object, and by SIGINT, SIGTERM or SIGHUP where
/// these would end the process.
class TemporaryName {
 public:
  /// A name that is not taken; `make` creates the file, and returns false with errno set where it
  /// cannot. Throws Error(kIo) then, unless the name was taken.
  template <class Make>
  TemporaryName(const std::filesystem::path& target, const Make& make) {
    do choose(target);
    while (!make(path_) && is_taken(target));
    keep_from_signals();
  }
  ~TemporaryName();
  TemporaryName(const TemporaryName&) = delete;
  TemporaryName& operator=(const TemporaryName&) = delete;

  /// Gives the file the target's name, in the place of what has it.
  void rename_to(const std::filesystem::path& target);

 private:
  void choose(const std::filesystem::path& target);
  bool is_taken(const std::filesystem::path& target) const;
  void keep_from_signals();
  void forget();

  std::string path_;
  bool exists_ = false;
  bool signals_remove_ = false;
};

/// A half-written file in the folder of its target. Where the file system has files without a name
/// (O_TMPFILE), it is one: it goes with this process, however that ends.
class TemporaryFile {
 public:
  enum class Naming { kUnnamedIfPossible, kNamed };

  explicit TemporaryFile(const std::filesystem::path& target,
                         Naming naming = Naming::kUnnamedIfPossible);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int descriptor() const { return descriptor_; }

  /// Puts the file, flushed to the disk, in the target's place.
  void publish();

 private:
  bool open_unnamed();
  void open_named();
  void take_over_owner_and_mode();

  std::filesystem::path target_;
  int descriptor_ = -1;
  std::optional<TemporaryName> name_;
};

}  // namespace uniep
