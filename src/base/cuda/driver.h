#pragma once

#include <cudaTypedefs.h>

#include <string>

namespace uniep::cuda {

/// The CUDA devices that this process sees; 0 where there is no driver.
int device_count();

/// Why device `ordinal` cannot run uniep's kernels, as a sentence; empty where it can.
std::string device_problem(int ordinal);

/// Throws Error(kUnsupported) with `device_problem`'s sentence where there is one.
void require_device(int ordinal);

/// Whether this process has used the device; where nobody can say, too.
bool has_context(int ordinal);

/// "NVIDIA H200 (compute capability 9.0, 132 SMs, 139.8 GiB)"; the device must exist.
std::string device_text(int ordinal);

/// SMs that kernels which wait for other ranks may hold together: all but UNIEP_SPARE_SMS. Throws
/// Error(kInvalidArgument) where fewer than two are left: under some schedules one dispatches while
/// others compute.
int sms_to_hold(int ordinal);

// Functions of the driver, which is not linked: most machines that build uniep have none.

// They throw Error(kUnsupported) where the driver lacks the function.
PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encode_tiled();
PFN_cuMemGetAddressRange_v3020 mem_get_address_range();
PFN_cuPointerGetAttribute_v4000 pointer_get_attribute();

}  // namespace uniep::cuda
