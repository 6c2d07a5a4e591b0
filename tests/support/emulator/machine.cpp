// Runs the blocks of a launch: their threads are fibers, in turns. Says what no GPU would: that all of them wait.
#include <setjmp.h>
#include <ucontext.h>

#include <map>
#include <string>
#include <vector>

#include "ptx.cuh"

alignas(1024) u8 memory[1 << 18];  // the kernels' own name of shared memory
Index threadIdx, blockIdx, blockDim, gridDim;
u32 mail[32][32][8];

namespace {
struct Barrier { int arrived; long turn; };
struct Phases { int count, arrived, bytes; long phase; };
struct Copy { u32 to; const void* from; };
struct Fiber {
  jmp_buf place;  // where it waits; switching contexts would ask the system for the mask of signals each time
  std::vector<char> stack = std::vector<char>(1 << 16);
  std::vector<std::vector<Copy>> copies;  // by group; the last is not committed
  bool begun, done;
};
jmp_buf scheduler;
std::vector<Fiber> fibers;
std::map<int, Barrier> barriers;
std::map<u32, Phases> phases;
std::string error;
bool moved;  // whether a wait ended, or may end, since the scheduler last began with its first fiber
bool early;  // every other block: copies are done when they are asked for too, and the first thread goes first
int limit;   // bytes of shared memory
void (*kernel)(void**);
void** given;

void pause() {
  if (!_setjmp(fibers[threadIdx.x].place)) _longjmp(scheduler, 1);
}
[[noreturn]] void fail(const std::string& what) {
  error = what;
  for (;;) pause();
}
void run() {  // of one block after the other
  for (;; pause()) {
    kernel(given);
    moved = fibers[threadIdx.x].done = true;
  }
}
void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  static ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = fiber.stack.data(), first.uc_stack.ss_size = fiber.stack.size();
  makecontext(&first, run, 0);
  setcontext(&first);
}
void settle(Phases& at) {
  if (at.arrived < at.count || at.bytes) return;
  at.arrived = 0, at.phase++, moved = true;
}
}  // namespace

u8* shared_bytes(u32 at, int bytes) {
  if (at + bytes > u32(limit)) fail("shared memory of " + std::to_string(limit) + " bytes is read or written at " + std::to_string(at));
  return memory + at;
}
u32 shared_address(const void* p) { return u32((const u8*)p - memory); }
void arrive(int name, int count) {
  Barrier& at = barriers[name];
  if (++at.arrived == count) at.arrived = 0, at.turn++, moved = true;
}
void join(int name, int count) {
  long turn = barriers[name].turn;
  arrive(name, count);
  while (barriers[name].turn == turn) pause();
  moved = true;
}
void copy16(u32 to, const void* from) {
  auto& groups = fibers[threadIdx.x].copies;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({to, from});
  if (early) std::memcpy(shared_bytes(to, 16), from, 16);
}
void copy16_or_zeros(u32 to, const void* from, bool there) {
  static const u8 zeros[16] = {};
  copy16(to, there ? from : zeros);
}
void copies_commit() { fibers[threadIdx.x].copies.emplace_back(); }
void copies_done(int but) {
  auto& groups = fibers[threadIdx.x].copies;
  while (int(groups.size()) > but + 1) {
    for (Copy& each : groups.front()) std::memcpy(shared_bytes(each.to, 16), each.from, 16);
    groups.erase(groups.begin());
  }
}
void barrier_init(u32 bar, int count) { phases[bar] = {count, 0, 0, 0}; }
void barrier_expect(u32 bar, int bytes) {
  phases[bar].bytes += bytes;
  barrier_arrive(bar);
}
void barrier_arrive(u32 bar) {
  phases[bar].arrived++;
  settle(phases[bar]);
}
void barrier_got(u32 bar, int bytes) {
  phases[bar].bytes -= bytes;
  settle(phases[bar]);
}
void barrier_wait(u32 bar, u32 parity) {
  while ((phases[bar].phase & 1) == parity) pause();
  moved = true;
}

// Returns what went wrong, or "".
extern "C" const char* launch(void (*called)(void**), void** arguments, int x, int y, int threads, int bytes) {
  if (!error.empty()) fibers.clear();  // they are in the middle of a kernel
  kernel = called, given = arguments, limit = bytes, error.clear();
  blockDim = {threads, 1}, gridDim = {x, y};
  if (bytes > int(sizeof(memory))) return "no block has so much shared memory";
  fibers.resize(max(threads, int(fibers.size())));
  for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) {
      std::memset(memory, 0x5A, sizeof(memory));
      early = !early;
      barriers.clear(), phases.clear();
      for (int i = 0; i < threads; i++) fibers[i].done = false, fibers[i].copies.clear();
      for (bool left = true; left;) {
        left = moved = false;
        for (int i = 0; i < threads && error.empty(); i++) {
          threadIdx.x = early ? i : threads - 1 - i;
          Fiber& fiber = fibers[threadIdx.x];
          if (!fiber.done) resume(fiber);
          left |= !fiber.done;
        }
        if (left && !moved && error.empty()) error = "all threads wait for one another";
        if (!error.empty()) return error.c_str();
      }
    }
  return "";
}
