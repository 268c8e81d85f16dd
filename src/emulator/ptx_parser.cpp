#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>

#include "emulator/ptx.h"
#include "emulator/ptx_text.h"
#include "emulator/ptx_variable.h"

namespace cute_attention::emulator {
namespace {

constexpr uint32_t kRegister32Bytes = kLanes * 4;
constexpr uint32_t kRegister64Bytes = kLanes * 8;

uint32_t round_up(uint32_t value, uint32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

bool begins_with(std::string const& text, char const* prefix) {
  return text.compare(0, std::strlen(prefix), prefix) == 0;
}

// A constant for each lane, so that functions read it as they read a register. Kept for good: equal
// constants share one.
template <class T>
void const* for_each_lane(uint64_t value) {
  static std::map<T, std::unique_ptr<T[]>> kept;
  std::unique_ptr<T[]>& lanes = kept[static_cast<T>(value)];
  if (!lanes) {
    lanes.reset(new T[kLanes]);
    std::fill_n(lanes.get(), kLanes, static_cast<T>(value));
  }
  return lanes.get();
}

Operand constant(uint64_t value) {
  Operand operand;
  operand.kind = OperandKind::kConstant;
  operand.value = value;
  operand.lanes32 = for_each_lane<uint32_t>(value);
  operand.lanes64 = for_each_lane<uint64_t>(value);
  return operand;
}

class Parser {
 public:
  Parser(std::string const& text, Module& module) : text_(text), module_(module) {}

  void run() {
    std::string statement, label;
    char end = 0;
    int skipped = 0;  // scopes of a function that is no kernel
    bool skip_next = false;
    while (text_.next(statement, end)) {
      if (end == ')') {
        skip_next = statement.find(".entry") == std::string::npos;
        if (!skip_next) begin_kernel(statement);
      } else if (end == '{') {
        if (skip_next || skipped > 0) {
          ++skipped;
          skip_next = false;
        } else {
          begin_scope();
        }
      } else if (end == '}') {
        if (skipped > 0) {
          --skipped;
        } else {
          end_scope();
        }
      } else if (skipped > 0 || statement.empty() || begins_with(statement, ".pragma")) {
        continue;
      } else if (end == ':') {
        label = statement;
        scopes_[scope_].labels[label] = static_cast<int>(kernel_->code.size());
      } else if (begins_with(statement, ".branchtargets")) {
        branch_tables_[label] = split_words(statement.substr(std::strlen(".branchtargets")));
      } else if (begins_with(statement, ".reg")) {
        declare_registers(statement, "");
      } else if (statement[0] == '.') {
        if (statement.find(".func") == std::string::npos) declare_variable(statement);
      } else {
        add_instruction(statement);
      }
    }
  }

 private:
  struct Registers {
    Operand first;
    int count;  // of a name with a number behind it; -1: one register of this very name
  };
  struct Scope {
    int outer;
    std::map<std::string, Registers> registers;
    std::map<std::string, int> labels;
  };
  struct Branch {
    int instruction;
    int scope;
    std::string label;
  };

  void begin_kernel(std::string const& header) {
    size_t const open = header.find('(');
    auto kernel = std::make_unique<Kernel>();
    kernel->name = split_words(header.substr(0, open)).back();
    for (std::string const& text :
         split_list(header.substr(open + 1, header.rfind(')') - open - 1))) {
      Variable const parameter(text);
      uint32_t const offset = round_up(kernel->parameter_bytes, parameter.align);
      kernel->parameters.push_back({parameter.name, offset, parameter.bytes()});
      kernel->parameter_bytes = offset + parameter.bytes();
    }
    kernel_ = kernel.get();
    module_.kernels[kernel_->name] = std::move(kernel);
  }

  void begin_scope() {
    if (kernel_ == nullptr) fail("PTX line %d: a scope outside of a kernel", text_.line());
    scopes_.push_back({scope_, {}, {}});
    scope_ = static_cast<int>(scopes_.size()) - 1;
    if (scope_ > 0) return;
    int number = 0;
    for (char const* name : kSpecialRegisters) {
      declare_registers(std::string(number++ < kSpecial32 ? ".reg .b32 " : ".reg .b64 ") + name,
                        "special ");
    }
  }

  void end_scope() {
    scope_ = scopes_[scope_].outer;
    if (scope_ >= 0) return;
    for (Branch const& branch : branches_) {
      kernel_->code[branch.instruction].target = find_label(branch.scope, branch.label);
    }
    for (Branch const& branch : table_branches_) {
      for (std::string const& label : branch_tables_[branch.label]) {
        kernel_->code[branch.instruction].targets.push_back(find_label(branch.scope, label));
      }
    }
    branches_.clear();
    table_branches_.clear();
    branch_tables_.clear();
    scopes_.clear();
    symbols_.clear();
    kernel_ = nullptr;
  }

  int find_label(int scope, std::string const& label) const {
    for (; scope >= 0; scope = scopes_[scope].outer) {
      auto const found = scopes_[scope].labels.find(label);
      if (found != scopes_[scope].labels.end()) return found->second;
    }
    fail("PTX of %s: no label %s", kernel_->name.c_str(), label.c_str());
  }

  // Names get `prefix` in front, so that special registers cannot be declared twice.
  void declare_registers(std::string const& statement, std::string const& prefix) {
    std::vector<std::string> const words = split_words(statement);
    std::string const type = words[1].substr(1);
    bool const is_predicate = type == "pred", is_wide = bytes_of(type) == 8;
    for (size_t i = 2; i < words.size(); ++i) {
      std::string name = words[i];
      int count = -1;
      size_t const angle = name.find('<');
      if (angle != std::string::npos) {
        count = std::stoi(name.substr(angle + 1));
        name.resize(angle);
      }
      uint32_t const registers = count < 0 ? 1 : count;
      Operand first;
      if (is_predicate) {
        first.kind = OperandKind::kPredicate;
        first.place = kernel_->predicates;
        kernel_->predicates += registers;
      } else {
        first.kind = is_wide ? OperandKind::kRegister64 : OperandKind::kRegister32;
        first.has_16_bits = bytes_of(type) == 2;
        first.place = kernel_->register_bytes;
        kernel_->register_bytes += registers * (is_wide ? kRegister64Bytes : kRegister32Bytes);
      }
      scopes_[scope_].registers[prefix + name] = {first, count};
    }
  }

  bool find_register(std::string const& name, Operand& found) const {
    size_t digits = name.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    for (int scope = scope_; scope >= 0; scope = scopes_[scope].outer) {
      auto const& registers = scopes_[scope].registers;
      auto const one = registers.find(name);
      if (one != registers.end() && one->second.count < 0) {
        found = one->second.first;
        return true;
      }
      if (digits == name.size()) continue;
      auto const many = registers.find(name.substr(0, digits));
      int const number = std::atoi(name.c_str() + digits);
      if (many == registers.end() || number >= many->second.count) continue;
      found = many->second.first;
      found.place += number * (found.kind == OperandKind::kPredicate    ? 1
                               : found.kind == OperandKind::kRegister64 ? kRegister64Bytes
                                                                        : kRegister32Bytes);
      return true;
    }
    return false;
  }

  void declare_variable(std::string const& statement) {
    Variable const variable(statement);
    if (variable.space == ".param") return;  // of a call, which fails when it is executed
    if (variable.space == ".shared") {
      if (variable.is_open) {
        symbol(variable.name) = kSharedBegin;
        return;
      }
      if (kernel_ == nullptr) fail("shared variable %s outside of a kernel", variable.name.c_str());
      uint32_t& used = kernel_->static_shared_bytes;
      used = round_up(used, variable.align);
      symbol(variable.name) = kSharedBegin + kStaticSharedBegin + used;
      used += variable.bytes();
    } else if (variable.space == ".local") {
      kernel_->local_bytes = round_up(kernel_->local_bytes, variable.align);
      symbol(variable.name) = kernel_->local_bytes;
      kernel_->local_bytes += variable.bytes();
    } else {
      uint32_t const bytes = round_up(variable.bytes() + 1, 256);
      auto* data = static_cast<uint8_t*>(std::aligned_alloc(256, bytes));
      std::memset(data, 0, bytes);
      set_elements(statement, variable.element, data);
      module_.variables[variable.name] = data;
    }
  }

  void set_elements(std::string const& statement, uint32_t element, uint8_t* data) {
    size_t const equals = statement.find('=');
    if (equals == std::string::npos) return;
    std::string values = trim(statement.substr(equals + 1));
    if (values[0] == '{') values = values.substr(1, values.size() - 2);
    for (std::string const& value : split_list(values)) {
      uint64_t const number = operand(value).value;
      std::memcpy(data, &number, element);
      data += element;
    }
  }

  // The value of a name: of this kernel if one is being read.
  uint64_t& symbol(std::string const& name) {
    return (kernel_ == nullptr ? module_symbols_ : symbols_)[name];
  }
  bool find_symbol(std::string const& name, uint64_t& value) const {
    for (auto const* symbols : {&symbols_, &module_symbols_}) {
      auto const found = symbols->find(name);
      if (found != symbols->end()) {
        value = found->second;
        return true;
      }
    }
    auto const variable = module_.variables.find(name);
    if (variable != module_.variables.end()) {
      value = reinterpret_cast<uint64_t>(variable->second);
      return true;
    }
    if (kernel_ == nullptr) return false;
    for (Parameter const& parameter : kernel_->parameters) {
      if (parameter.name != name) continue;
      value = parameter.offset;
      return true;
    }
    return false;
  }

  std::vector<Operand> operands(std::string const& list) const {
    std::vector<Operand> found;
    for (std::string const& text : split_list(list)) found.push_back(operand(text));
    return found;
  }

  Operand operand(std::string const& text) const {
    Operand result;
    if (text == "_") {
      result.kind = OperandKind::kSink;
    } else if (text[0] == '!') {
      result = operand(trim(text.substr(1)));
      result.negated = !result.negated;
    } else if (text[0] == '{') {
      result.kind = OperandKind::kVector;
      result.parts = operands(text.substr(1, text.size() - 2));
    } else if (text[0] == '[') {
      result = address(text.substr(1, text.size() - 2));
    } else if (size_t const bar = text.find('|'); bar != std::string::npos) {
      result.kind = OperandKind::kVector;
      result.parts = {operand(trim(text.substr(0, bar))), operand(trim(text.substr(bar + 1)))};
    } else if (!find_register(text, result) && !find_register("special " + text, result)) {
      if (text[0] == '%') fail("PTX line %d: unknown register %s", text_.line(), text.c_str());
      result = number_or_name(text);
    }
    return result;
  }

  Operand address(std::string const& text) const {
    Operand result;
    result.kind = OperandKind::kAddress;
    std::vector<std::string> const parts = split_list(text);
    size_t const plus = parts[0].rfind('+');
    if (plus != std::string::npos) {
      result.value = std::strtoll(parts[0].c_str() + plus + 1, nullptr, 0);
    }
    result.parts.push_back(operand(trim(parts[0].substr(0, plus))));
    for (size_t i = 1; i < parts.size(); ++i) result.parts.push_back(operand(parts[i]));
    return result;
  }

  Operand number_or_name(std::string const& text) const {
    if (text[0] == '0' && (begins_with(text, "0f") || begins_with(text, "0F") ||
                           begins_with(text, "0d") || begins_with(text, "0D"))) {
      return constant(std::strtoull(text.c_str() + 2, nullptr, 16));
    }
    if (text[0] == '-') return constant(std::strtoll(text.c_str(), nullptr, 0));
    if (std::isdigit(static_cast<unsigned char>(text[0]))) {
      return constant(std::strtoull(text.c_str(), nullptr, 0));
    }
    size_t const plus = text.find('+');
    uint64_t value = 0;
    if (!find_symbol(trim(text.substr(0, plus)), value)) return Operand();
    if (plus != std::string::npos) value += std::strtoll(text.c_str() + plus + 1, nullptr, 0);
    return constant(value);
  }

  static void add_registers(std::vector<Operand> const& operands, std::vector<uint32_t>& places) {
    for (Operand const& operand : operands) {
      if (operand.kind == OperandKind::kRegister32 || operand.kind == OperandKind::kRegister64) {
        places.push_back(operand.place);
      }
      add_registers(operand.parts, places);
    }
  }

  void add_instruction(std::string statement) {
    Instruction instruction;
    instruction.line = text_.line();
    if (statement[0] == '@') {
      size_t const space = statement.find_first_of(" \t");
      Operand const guard = operand(statement.substr(1, space - 1));
      instruction.guard = static_cast<int>(guard.place);
      instruction.guard_negated = guard.negated;
      statement = trim(statement.substr(space));
    }
    size_t const space = std::min(statement.find_first_of(" \t\n"), statement.size());
    std::string opcode = statement.substr(0, space);
    std::string const list = trim(statement.substr(space));
    for (size_t dot; (dot = opcode.find('.')) != std::string::npos; opcode.erase(0, dot + 1)) {
      instruction.words.push_back(opcode.substr(0, dot));
    }
    instruction.words.push_back(opcode);

    int const number = static_cast<int>(kernel_->code.size());
    std::string const& name = instruction.words[0];
    if (name == "bra") {
      branches_.push_back({number, scope_, list});
    } else if (name == "brx") {
      std::vector<std::string> const parts = split_list(list);
      instruction.operands = {operand(parts[0])};
      table_branches_.push_back({number, scope_, parts[1]});
    } else if (name != "call") {
      instruction.operands = operands(list);
    }
    add_registers(instruction.operands, instruction.registers);
    decode(instruction);
    kernel_->code.push_back(std::move(instruction));
  }

  PtxText text_;
  Module& module_;
  Kernel* kernel_ = nullptr;
  std::vector<Scope> scopes_;
  int scope_ = -1;
  std::vector<Branch> branches_, table_branches_;
  std::map<std::string, std::vector<std::string>> branch_tables_;
  std::map<std::string, uint64_t> symbols_, module_symbols_;
};

}  // namespace

uint32_t bytes_of(std::string const& type) {
  if (type == "pred") return 0;
  if (type.size() < 2 || !std::isalpha(static_cast<unsigned char>(type[0]))) return 0;
  if (type == "f16x2" || type == "bf16x2") return 4;
  static std::map<std::string, uint32_t> const kBytes = {{"8", 1}, {"16", 2}, {"32", 4}, {"64", 8}};
  size_t const digits = type.find_first_of("0123456789");
  if (digits == std::string::npos) return 0;
  auto const found = kBytes.find(type.substr(digits));
  return found == kBytes.end() ? 0 : found->second;
}

void parse(std::string const& text, Module& module) { Parser(text, module).run(); }

}  // namespace cute_attention::emulator
