#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <memory>
#include <string>

namespace uniep::rail {

/// The functions of libfabric that are not inline in its headers. It is loaded when a group of
/// several hosts is made: whoever has none needs no such library.
struct FabricLibrary {
  decltype(&fi_getinfo) getinfo = nullptr;
  decltype(&fi_freeinfo) freeinfo = nullptr;
  decltype(&fi_dupinfo) dupinfo = nullptr;
  decltype(&fi_fabric) fabric = nullptr;
  decltype(&fi_strerror) strerror = nullptr;

  /// Throws Error(kUnsupported) where it cannot be loaded.
  static const FabricLibrary& get();

  /// Throws Error(kDevice) where `result` is an error of `call`.
  void check(long result, const char* call) const;
};

struct InfoDeleter {
  void operator()(fi_info* info) const { FabricLibrary::get().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, InfoDeleter>;

struct FidDeleter {
  template <class T>
  void operator()(T* object) const {
    fi_close(&object->fid);
  }
};
/// An object of libfabric, closed when it goes.
template <class T>
using Fid = std::unique_ptr<T, FidDeleter>;

}  // namespace uniep::rail
