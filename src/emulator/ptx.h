// emulator/ptx.h: PTX as the emulator holds it. A kernel is a list of decoded instructions, each
// with the function that executes it for the lanes of a warp (PTX ISA 9.0).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cute_attention::emulator {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = ~0u;

// The first address of shared memory: none is null. Variables of a fixed size lie behind the memory
// whose size a launch gives.
constexpr uint32_t kSharedBegin = 1024;
constexpr uint32_t kStaticSharedBegin = 232448;

// Prints what is wrong and ends the process: a kernel cannot go on.
[[noreturn]] void fail(char const* format, ...) __attribute__((format(printf, 1, 2)));

struct Warp;
struct Instruction;

// Executes an instruction for the lanes in `mask`.
using Execute = void (*)(Warp& warp, Instruction const& instruction, uint32_t mask);

enum class OperandKind : uint8_t {
  kNone,        // the name of a label or of a function
  kRegister32,  // also one of 16 bits
  kRegister64,
  kPredicate,
  kConstant,
  kVector,   // {a, b, ...} or a|b
  kAddress,  // [base + offset], or of a tensor [map, {coordinates}]
  kSink,     // _
};

struct Operand {
  OperandKind kind = OperandKind::kNone;
  bool negated = false;           // of a predicate
  bool has_16_bits = false;       // of a register
  uint32_t place = 0;             // bytes into the registers of a warp; the number of a predicate
  uint64_t value = 0;             // of a constant; the offset of an address
  void const* lanes32 = nullptr;  // of a constant: its value for each lane
  void const* lanes64 = nullptr;
  std::vector<Operand> parts;  // of a vector; of an address its base and the coordinates
};

struct Instruction {
  Execute execute = nullptr;
  int guard = -1;  // the predicate of @p, or none
  bool guard_negated = false;
  bool may_block = false;  // or branch: the warp's lanes must know where they are
  int line = 0;
  int target = -1;                 // of a branch
  std::vector<int> targets;        // of brx.idx
  std::vector<std::string> words;  // of the opcode, such as {"add", "s32"}
  std::vector<Operand> operands;
  std::vector<uint32_t> registers;  // the places of all that it reads or writes
  // What the function that decodes an instruction leaves for the one that executes it.
  uint32_t size = 0;   // bytes of an element; or a number, such as N of a WGMMA
  uint32_t space = 0;  // a Space (memory.h)
  uint32_t mode = 0;

  bool has(char const* word) const {
    for (std::string const& other : words) {
      if (other == word) return true;
    }
    return false;
  }
  std::string opcode() const {
    std::string joined;
    for (std::string const& word : words) joined += (joined.empty() ? "" : ".") + word;
    return joined;
  }
};

struct Parameter {
  std::string name;
  uint32_t offset;
  uint32_t bytes;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t register_bytes = 0;  // of a warp
  uint32_t predicates = 0;
  uint32_t local_bytes = 0;  // of a thread
  uint32_t static_shared_bytes = 0;
  std::vector<Instruction> code;
};

struct Module {
  std::map<std::string, uint8_t*> variables;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

// Adds the kernels and variables of PTX text to a module. Functions that are not kernels are
// skipped.
void parse(std::string const& text, Module& module);

// The bytes of a type, such as 4 of "f32".
uint32_t bytes_of(std::string const& type);

// Sets `execute`, and what it needs, from words and operands. An instruction that the emulator does
// not know gets a function that fails.
void decode(Instruction& instruction);

// The names of the special registers, in the order in which they lie in front of a warp's
// registers. The first kSpecial32 have 32 bits.
constexpr int kSpecial32 = 27;
constexpr char const* kSpecialRegisters[] = {"%tid.x",
                                             "%tid.y",
                                             "%tid.z",
                                             "%ntid.x",
                                             "%ntid.y",
                                             "%ntid.z",
                                             "%ctaid.x",
                                             "%ctaid.y",
                                             "%ctaid.z",
                                             "%nctaid.x",
                                             "%nctaid.y",
                                             "%nctaid.z",
                                             "%laneid",
                                             "%warpid",
                                             "%smid",
                                             "%nsmid",
                                             "%lanemask_lt",
                                             "%lanemask_le",
                                             "%lanemask_gt",
                                             "%lanemask_ge",
                                             "%lanemask_eq",
                                             "%clock",
                                             "%dynamic_smem_size",
                                             "%cluster_ctarank",
                                             "%cluster_nctarank",
                                             "%clusterid.x",
                                             "%cluster_ctaid.x",
                                             "%globaltimer",
                                             "%clock64"};

}  // namespace cute_attention::emulator
