// An operation that keeps a virtual CPU device busy for a given time without using a core.

#include <algorithm>
#include <chrono>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// `token` orders one sleep after another; the result is `token` again, known after `ms`.
static ffi::Error Sleep(ffi::Buffer<ffi::F32> ms, ffi::Buffer<ffi::F32> token,
                        ffi::ResultBuffer<ffi::F32> after) {
  const double wanted = std::max(0.0f, ms.typed_data()[0]);
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(wanted));
  after->typed_data()[0] = token.typed_data()[0];
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(FuseJaxSleep, Sleep,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
