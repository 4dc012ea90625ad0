// A stage that breaks when told to.

#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error FaultImpl(ffi::AnyBuffer x, ffi::Buffer<ffi::S32> on,
                            ffi::Result<ffi::AnyBuffer> out) {
  if (on.typed_data()[0]) return ffi::Error(ffi::ErrorCode::kInternal, "injected fault");
  std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Fault, FaultImpl,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>());
