// A task that takes a given time on a machine without the device: its thread sleeps.

#include <chrono>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Clock = std::chrono::steady_clock;

// The time now, as two words; x only says when to look.
static ffi::Error StampImpl(ffi::AnyBuffer x, ffi::ResultBuffer<ffi::S32> out) {
  int64_t ticks = Clock::now().time_since_epoch().count();
  std::memcpy(out->untyped_data(), &ticks, sizeof ticks);
  return ffi::Error::Success();
}

// x, not before `ms` after the stamp.
static ffi::Error PaceImpl(ffi::AnyBuffer x, ffi::Buffer<ffi::S32> stamp,
                           ffi::Buffer<ffi::F32> ms, ffi::Result<ffi::AnyBuffer> out) {
  int64_t ticks;
  std::memcpy(&ticks, stamp.untyped_data(), sizeof ticks);
  auto pause = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double, std::milli>(ms.typed_data()[0]));
  std::this_thread::sleep_until(Clock::time_point(Clock::duration(ticks)) + pause);
  std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Stamp, StampImpl, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::Buffer<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Pace, PaceImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());
