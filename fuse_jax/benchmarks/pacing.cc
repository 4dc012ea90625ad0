// A task that takes a given time on a machine without the device: its thread sleeps.

#include <chrono>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error PaceImpl(ffi::AnyBuffer x, ffi::Buffer<ffi::F32> ms,
                           ffi::Result<ffi::AnyBuffer> out) {
  auto until = std::chrono::steady_clock::now() +
               std::chrono::duration<double, std::milli>(ms.typed_data()[0]);
  if (out->untyped_data() != x.untyped_data()) {
    std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  }
  std::this_thread::sleep_until(until);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Pace, PaceImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());
