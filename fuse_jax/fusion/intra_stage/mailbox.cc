// In-process messages between the devices of one XLA program on CPU.
//
// A send never blocks; a receive waits for the message that it names. A program has one slot a
// (device, lane); a message is keyed by (run, tag) in the receiver's slot. Runs are counted by the
// slots themselves, so a program needs no operand for it and two runs in flight do not mix.
//
// When a wait lasts too long, or a caller aborts, every wait of the program ends with an error and
// every later operation fails at once, until the program is drained.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Clock = std::chrono::steady_clock;
using Bytes = std::vector<char>;

enum State : int32_t { kIdle = 0, kWaiting = 1, kRunning = 2, kDone = 3 };

double Seconds(Clock::time_point t) {
  return std::chrono::duration<double>(t.time_since_epoch()).count();
}

struct Span {
  int32_t run, slot, task;
  double start, end;
};

struct Slot {
  std::mutex mutex;
  std::condition_variable changed;
  std::unordered_map<uint64_t, Bytes> mail;  // (run, tag) -> payload
  int32_t run = 0;
  int32_t task = -1;
  State state = kIdle;
  Clock::time_point since = Clock::now();
  int inside = 0;  // operations now waiting in this slot
  std::vector<Span> spans;
};

struct Failure {
  bool set = false;
  int32_t slot = -1;
  int32_t task = -1;
  std::string reason;
};

struct Program {
  Program(int32_t devices, int32_t lanes, double timeout)
      : devices(devices), lanes(lanes), timeout(timeout), slots(devices * lanes) {}

  const int32_t devices, lanes;
  const std::chrono::duration<double> timeout;
  std::vector<Slot> slots;
  std::atomic<bool> aborted{false};
  std::atomic<bool> recording{false};
  std::mutex mutex;  // of what follows
  Failure failure;
  std::map<int32_t, int32_t> arrived;  // run -> slots that have finished it
  std::condition_variable all_arrived;
  int at_barrier = 0;
};

std::mutex programs_mutex;
// Never freed: an executable may outlive the caller's handle.
std::map<int64_t, std::unique_ptr<Program>> programs;

Program* Find(int64_t id) {
  std::lock_guard<std::mutex> lock(programs_mutex);
  auto found = programs.find(id);
  return found == programs.end() ? nullptr : found->second.get();
}

std::string Name(const Program& p, int32_t slot, int32_t task) {
  std::string name = "device " + std::to_string(slot / p.lanes);
  if (p.lanes > 1) name += " lane " + std::to_string(slot % p.lanes);
  return task < 0 ? name : name + " task " + std::to_string(task);
}

ffi::Error Aborted(Program& p) {
  std::lock_guard<std::mutex> lock(p.mutex);
  return ffi::Error(ffi::ErrorCode::kAborted, "mailbox: step given up, " +
                                                  Name(p, p.failure.slot, p.failure.task) + ": " +
                                                  p.failure.reason);
}

// The device to blame for a wait without end: the one that is in a task and does not wait, the
// longest; else (a message is missing) the one that waits the longest, though the message that is
// missing may be another's; else the one that noticed. One that never began is not known of.
int32_t Culprit(Program& p, int32_t noticed) {
  int32_t found = noticed;
  State worst = kDone;
  Clock::time_point oldest = Clock::time_point::max();
  for (size_t i = 0; i < p.slots.size(); ++i) {
    Slot& slot = p.slots[i];
    std::lock_guard<std::mutex> lock(slot.mutex);
    if (slot.state != kRunning && (slot.state != kWaiting || worst == kRunning)) continue;
    if (slot.state == worst && slot.since >= oldest) continue;
    worst = slot.state;
    oldest = slot.since;
    found = static_cast<int32_t>(i);
  }
  return found;
}

void Blame(Program& p, int32_t culprit, const std::string& reason) {
  int32_t task = -1;
  {
    std::lock_guard<std::mutex> lock(p.slots[culprit].mutex);
    task = p.slots[culprit].task;
  }
  {
    std::lock_guard<std::mutex> lock(p.mutex);
    if (!p.failure.set) p.failure = Failure{true, culprit, task, reason};
    p.aborted = true;
  }
  p.all_arrived.notify_all();
  for (Slot& slot : p.slots) {
    // The empty critical section: a waiter has either seen `aborted` or is asleep already.
    { std::lock_guard<std::mutex> lock(slot.mutex); }
    slot.changed.notify_all();
  }
}

void Abort(Program& p, int32_t noticed, const std::string& reason) {
  Blame(p, Culprit(p, noticed), reason);
}

uint64_t Key(int32_t run, int32_t tag) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(run)) << 32) | static_cast<uint32_t>(tag);
}

// What every operation is told about its caller.
struct Caller {
  Program* program;
  Slot* slot;
  int32_t index, run, task;
};

ffi::Error Enter(int64_t id, const int32_t* head, Caller* caller) {
  Program* p = Find(id);
  if (p == nullptr) {
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "mailbox: program " + std::to_string(id) + " is not of this process");
  }
  int32_t run = head[0], device = head[1], lane = head[2], task = head[3];
  if (device < 0 || device >= p->devices || lane < 0 || lane >= p->lanes) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "mailbox: no device " + std::to_string(device) + " lane " +
                          std::to_string(lane) + " in a program of " +
                          std::to_string(p->devices) + " x " + std::to_string(p->lanes));
  }
  int32_t index = device * p->lanes + lane;
  *caller = Caller{p, &p->slots[index], index, run, task};
  if (p->aborted) return Aborted(*p);
  return ffi::Error::Success();
}

// True if the caller belongs to a run that was given up and drained since.
bool Stale(const Caller& c) { return c.slot->run != c.run; }

ffi::Error StaleError(const Caller& c) {
  return ffi::Error(ffi::ErrorCode::kAborted,
                    "mailbox: run " + std::to_string(c.run) + " was given up earlier");
}

// With the slot locked.
void Record(const Caller& c) {
  if (!c.program->recording) return;
  c.slot->spans.push_back({c.run, c.index, c.task, Seconds(c.slot->since), Seconds(Clock::now())});
}

void MoveTo(Slot& slot, State state, int32_t task) {
  slot.state = state;
  slot.task = task;
  slot.since = Clock::now();
}

using Head = ffi::Buffer<ffi::S32>;
using Zero = ffi::ResultBuffer<ffi::F32>;

ffi::Error BeginImpl(int64_t id, Head head, ffi::ResultBuffer<ffi::S32> out) {
  out->typed_data()[0] = 0;
  Caller c;
  ffi::Error error = Enter(id, head.typed_data(), &c);
  if (error.failure()) return error;
  std::lock_guard<std::mutex> lock(c.slot->mutex);
  MoveTo(*c.slot, kRunning, -1);
  out->typed_data()[0] = ++c.slot->run;
  return ffi::Error::Success();
}

ffi::Error RecvImpl(int64_t id, Head head, ffi::Result<ffi::AnyBuffer> out) {
  Caller c;
  ffi::Error error = Enter(id, head.typed_data(), &c);
  if (error.failure()) return error;
  int32_t tag = head.typed_data()[4];
  std::unique_lock<std::mutex> lock(c.slot->mutex);
  if (Stale(c)) return StaleError(c);
  if (tag < 0) {
    MoveTo(*c.slot, kRunning, c.task);
    lock.unlock();
    std::memset(out->untyped_data(), 0, out->size_bytes());
    return ffi::Error::Success();
  }
  MoveTo(*c.slot, kWaiting, c.task);
  uint64_t key = Key(c.run, tag);
  ++c.slot->inside;
  bool came = c.slot->changed.wait_for(lock, c.program->timeout, [&] {
    return c.program->aborted || Stale(c) || c.slot->mail.count(key);
  });
  --c.slot->inside;
  if (c.program->aborted) {
    lock.unlock();
    return Aborted(*c.program);
  }
  if (Stale(c)) return StaleError(c);
  if (!came) {
    lock.unlock();
    Abort(*c.program, c.index, Name(*c.program, c.index, c.task) + " waited too long for it");
    return Aborted(*c.program);
  }
  auto found = c.slot->mail.find(key);
  Bytes payload = std::move(found->second);
  c.slot->mail.erase(found);
  MoveTo(*c.slot, kRunning, c.task);
  lock.unlock();
  if (payload.size() != out->size_bytes()) {
    Abort(*c.program, c.index,
          "its message has " + std::to_string(payload.size()) + " bytes, not " +
              std::to_string(out->size_bytes()));
    return Aborted(*c.program);
  }
  std::memcpy(out->untyped_data(), payload.data(), payload.size());
  return ffi::Error::Success();
}

// What comes after the head is only to be there before: the task's other results.
ffi::Error SendImpl(int64_t id, ffi::AnyBuffer x, Head head, ffi::RemainingArgs, Zero out) {
  out->typed_data()[0] = 0.0f;
  Caller c;
  ffi::Error error = Enter(id, head.typed_data(), &c);
  if (error.failure()) return error;
  int32_t to = head.typed_data()[4], tag = head.typed_data()[5];
  if (to >= c.program->devices) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "mailbox: a message to device " + std::to_string(to));
  }
  {
    std::lock_guard<std::mutex> lock(c.slot->mutex);
    if (Stale(c)) return StaleError(c);
    Record(c);
    // Still "running": nothing else of this device may be to blame until its next operation.
    c.slot->task = c.task;
  }
  if (to < 0) return ffi::Error::Success();
  const char* data = static_cast<const char*>(x.untyped_data());
  Bytes payload(data, data + x.size_bytes());
  Slot& receiver = c.program->slots[to * c.program->lanes + c.index % c.program->lanes];
  {
    std::lock_guard<std::mutex> lock(receiver.mutex);
    receiver.mail[Key(c.run, tag)] = std::move(payload);
  }
  receiver.changed.notify_all();
  return ffi::Error::Success();
}

ffi::Error MarkImpl(int64_t id, Head head, Zero out) {
  out->typed_data()[0] = 0.0f;
  Caller c;
  ffi::Error error = Enter(id, head.typed_data(), &c);
  if (error.failure()) return error;
  std::lock_guard<std::mutex> lock(c.slot->mutex);
  if (Stale(c)) return StaleError(c);
  MoveTo(*c.slot, kRunning, c.task);
  return ffi::Error::Success();
}

ffi::Error LeaveImpl(int64_t id, ffi::AnyBuffer, Head head, ffi::RemainingArgs, Zero out) {
  out->typed_data()[0] = 0.0f;
  Caller c;
  ffi::Error error = Enter(id, head.typed_data(), &c);
  if (error.failure()) return error;
  std::lock_guard<std::mutex> lock(c.slot->mutex);
  if (Stale(c)) return StaleError(c);
  Record(c);
  MoveTo(*c.slot, kDone, c.task);
  return ffi::Error::Success();
}

ffi::Error FinishImpl(int64_t id, Head head, Zero out) {
  out->typed_data()[0] = 0.0f;
  Caller c;
  ffi::Error error = Enter(id, head.typed_data(), &c);
  if (error.failure()) return error;
  {
    std::lock_guard<std::mutex> lock(c.slot->mutex);
    if (Stale(c)) return StaleError(c);
    MoveTo(*c.slot, kDone, c.slot->task);
  }
  Program& p = *c.program;
  const int32_t everyone = static_cast<int32_t>(p.slots.size());
  std::unique_lock<std::mutex> lock(p.mutex);
  if (++p.arrived[c.run] == everyone) {
    lock.unlock();
    p.all_arrived.notify_all();
    return ffi::Error::Success();
  }
  ++p.at_barrier;
  bool came = p.all_arrived.wait_for(
      lock, p.timeout, [&] { return p.aborted || p.arrived[c.run] == everyone; });
  --p.at_barrier;
  bool complete = p.arrived[c.run] == everyone;
  // A run before this one has been left by all, for this one was begun by all.
  if (complete) p.arrived.erase(p.arrived.begin(), p.arrived.lower_bound(c.run));
  lock.unlock();
  if (complete) return ffi::Error::Success();
  if (!came) Abort(p, c.index, Name(p, c.index, -1) + " waited too long for its last task");
  return Aborted(p);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MailboxBegin, BeginImpl,
    ffi::Ffi::Bind().Attr<int64_t>("program").Arg<Head>().Ret<ffi::Buffer<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MailboxRecv, RecvImpl,
    ffi::Ffi::Bind().Attr<int64_t>("program").Arg<Head>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MailboxSend, SendImpl,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("program")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Head>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MailboxMark, MarkImpl,
    ffi::Ffi::Bind().Attr<int64_t>("program").Arg<Head>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MailboxLeave, LeaveImpl,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("program")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Head>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MailboxFinish, FinishImpl,
    ffi::Ffi::Bind().Attr<int64_t>("program").Arg<Head>().Ret<ffi::Buffer<ffi::F32>>());

// The caller's side, by ctypes.
extern "C" {

void mailbox_create(int64_t id, int32_t devices, int32_t lanes, double timeout) {
  std::lock_guard<std::mutex> lock(programs_mutex);
  programs[id] = std::make_unique<Program>(devices, lanes, timeout);
}

void mailbox_blame(int64_t id, int32_t slot, const char* reason) { Blame(*Find(id), slot, reason); }

// Slot and task to blame and the reason (cut to `size` bytes); 0 if nothing failed.
int32_t mailbox_failure(int64_t id, int32_t* slot, int32_t* task, char* reason, int64_t size) {
  Program& p = *Find(id);
  std::lock_guard<std::mutex> lock(p.mutex);
  if (!p.failure.set) return 0;
  *slot = p.failure.slot;
  *task = p.failure.task;
  std::strncpy(reason, p.failure.reason.c_str(), size - 1);
  reason[size - 1] = 0;
  return 1;
}

// Per slot: task, state; seconds in that state.
void mailbox_progress(int64_t id, int32_t* task, int32_t* state, double* seconds) {
  Program& p = *Find(id);
  for (size_t i = 0; i < p.slots.size(); ++i) {
    std::lock_guard<std::mutex> lock(p.slots[i].mutex);
    task[i] = p.slots[i].task;
    state[i] = p.slots[i].state;
    seconds[i] = Seconds(Clock::now()) - Seconds(p.slots[i].since);
  }
}

// Forget every message and the failure; 0 while an operation still waits.
int32_t mailbox_drain(int64_t id) {
  Program& p = *Find(id);
  int32_t last = 0;
  for (Slot& slot : p.slots) {
    std::lock_guard<std::mutex> lock(slot.mutex);
    if (slot.inside) return 0;
    last = std::max(last, slot.run);
  }
  std::lock_guard<std::mutex> lock(p.mutex);
  if (p.at_barrier) return 0;
  for (Slot& slot : p.slots) {
    std::lock_guard<std::mutex> inner(slot.mutex);
    slot.mail.clear();
    slot.spans.clear();
    slot.run = last + 1;  // a straggler of the old run is refused from now on
    MoveTo(slot, kIdle, -1);
  }
  p.arrived.clear();
  p.failure = Failure();
  p.aborted = false;
  return 1;
}

// Messages that nobody has received.
int64_t mailbox_pending(int64_t id) {
  int64_t count = 0;
  for (Slot& slot : Find(id)->slots) {
    std::lock_guard<std::mutex> lock(slot.mutex);
    count += static_cast<int64_t>(slot.mail.size());
  }
  return count;
}

void mailbox_record(int64_t id, int32_t on) {
  Program& p = *Find(id);
  p.recording = on != 0;
  for (Slot& slot : p.slots) {
    std::lock_guard<std::mutex> lock(slot.mutex);
    if (on) slot.spans.clear();
  }
}

// Spans recorded so far: count, and (if rows is given, [count, 5]) run, slot, task, start, end.
int64_t mailbox_spans(int64_t id, double* rows, int64_t room) {
  int64_t count = 0;
  for (Slot& slot : Find(id)->slots) {
    std::lock_guard<std::mutex> lock(slot.mutex);
    for (const Span& span : slot.spans) {
      if (rows != nullptr && count < room) {
        double* row = rows + 5 * count;
        row[0] = span.run;
        row[1] = span.slot;
        row[2] = span.task;
        row[3] = span.start;
        row[4] = span.end;
      }
      ++count;
    }
  }
  return count;
}

}  // extern "C"
