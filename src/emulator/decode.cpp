#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "emulator/lanes.h"

namespace cute_attention::emulator {
namespace {

void refuse(Warp& warp, Instruction const& instruction, uint32_t) {
  fail("%s: the emulator does not know %s", where(warp).c_str(), instruction.opcode().c_str());
}

}  // namespace

void fail(char const* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "emulator: ");
  std::vfprintf(stderr, format, arguments);
  std::fprintf(stderr, "\n");
  va_end(arguments);
  std::fflush(nullptr);
  std::abort();
}

void decode(Instruction& instruction) {
  static std::set<std::string> const kMayBlock = {
      "bra",      "brx",      "ret",       "exit",    "shfl",          "vote",
      "redux",    "elect",    "bar",       "barrier", "mbarrier",      "mma",
      "ldmatrix", "stmatrix", "movmatrix", "wgmma",   "griddepcontrol"};
  instruction.may_block = kMayBlock.count(instruction.words[0]) != 0;
  for (auto const decode_some : {decode_bulk_copy, decode_async_copy, decode_wgmma, decode_matrix,
                                 decode_control, decode_barrier, decode_memory, decode_conversion,
                                 decode_comparison, decode_bits, decode_arithmetic}) {
    instruction.execute = decode_some(instruction);
    if (instruction.execute != nullptr) return;
  }
  instruction.execute = refuse;
}

}  // namespace cute_attention::emulator
