// Many elementwise operators in one pass over memory, for many tensors at once: what optimizers are made of. A program
// is computed block by block, each operator on a block that is cached, in the order and the rounding of the operators.
#pragma once
#include <limits>

#include "usual_programs.h"

namespace onward {
namespace ONWARD_ISA {

constexpr Index kBlock = 512;  // floats

using Step = void (*)(const float* a, const float* b, float* to, Index count);

// Operands that are numbers are the same for all elements.
template <int operation, bool a_is_number, bool b_is_number>
void take_step(const float* a, const float* b, float* to, Index count) {
  for (Index i = 0; i < count; i += kLanes)
    store(to + i, operate<operation>(a_is_number ? all(*a) : load(a + i), b_is_number ? all(*b) : load(b + i)));
}

template <int operation>
Step step_of(bool a_is_number, bool b_is_number) {
  if (a_is_number) return b_is_number ? take_step<operation, true, true> : take_step<operation, true, false>;
  return b_is_number ? take_step<operation, false, true> : take_step<operation, false, false>;
}

template <int... operations>
Step find_step(Index operation, bool a, bool b, std::integer_sequence<int, operations...>) {
  static constexpr Step (*kAll[])(bool, bool) = {step_of<operations>...};
  return kAll[operation](a, b);
}

inline bool is_finite(const Tensor<const float>& x) {
  return std::all_of(x.data, x.data + x.size(), [](float number) { return std::isfinite(number); });
}

// A number that is there once all inputs are, for those that must wait for them; finite if the first one, the loss, is.
struct Ready : Kernel {
  explicit Ready(const Attributes&) {}

  void compute(const Call& call) const override {
    const auto loss = call.input(0);
    *call.output(0, {}).data = is_finite(loss) ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
};

// Inputs: `numbers`, then the `tensors` of each item, then, if it is `guarded`, a number: nothing is written unless it is
// finite. Outputs: those of each item. The program has four integers for each operator: which one, and its operands, in
// the order of numbers, tensors, and what operators gave before.
struct Elementwise : Kernel {
  explicit Elementwise(const Attributes& attributes)
      : numbers(attributes.integer("numbers", 0)), tensors(attributes.integer("tensors", 0)),
        is_guarded(attributes.integer("guarded", 0) != 0), results(attributes.integers("results", {})) {
    const auto program = attributes.integers("program", {});
    require(numbers >= 0 && tensors > 0 && program.size() % 4 == 0, "a program has tensors, and four integers a step");
    Index known = numbers + tensors;
    for (size_t i = 0; i < program.size(); i += 4, known++) {
      const Instruction it{program[i], {program[i + 1], program[i + 2], program[i + 3]}};
      require(it.operation >= 0 && it.operation < kOperations, "there is no such operator in a program");
      for (Index operand : it.operands) require(operand >= 0 && operand < known, "an operand is not known yet");
      require(it.operation != kWhere || it.operands[0] < numbers, "a condition is a number");
      instructions.push_back(it);
    }
    for (Index result : results) require(result >= numbers + tensors && result < known, "a result is not computed");
    run_whole = find_usual(instructions, numbers, tensors, results);
    give_places();
  }

  // Each result of an instruction gets a place in memory that nothing needs any more, so that few stay in the first cache.
  void give_places() {
    const size_t given = static_cast<size_t>(numbers + tensors);
    std::vector<size_t> last_use(given + instructions.size(), 0);
    for (size_t i = 0; i < instructions.size(); i++)
      for (Index operand : instructions[i].operands) last_use[static_cast<size_t>(operand)] = i;
    for (Index result : results) last_use[static_cast<size_t>(result)] = instructions.size();
    std::vector<size_t> taken_until;
    for (size_t i = 0; i < instructions.size(); i++) {
      const auto free = std::find_if(taken_until.begin(), taken_until.end(), [&](size_t until) { return until <= i; });
      places.push_back(free - taken_until.begin());
      if (free == taken_until.end())
        taken_until.push_back(last_use[given + i]);
      else
        *free = last_use[given + i];
    }
    place_count = static_cast<Index>(taken_until.size());
  }

  struct Item {
    Index first_block, size;
    const float* const* inputs;
    float* const* outputs;
  };

  void compute(const Call& call) const override {
    const size_t per_item = static_cast<size_t>(tensors), made = results.size();
    const size_t first = static_cast<size_t>(numbers), given = call.input_count() - is_guarded;
    const size_t count = given < first ? 0 : (given - first) / per_item;
    require(given == first + count * per_item && call.output_count() == count * made, "inputs and outputs do not fit");
    std::vector<const float*> inputs, values;
    std::vector<float*> outputs;
    std::vector<Item> items;
    for (size_t i = 0; i < first; i++) {
      const auto number = call.input(i);
      require(number && number.size() == 1, "a number is one");
      values.push_back(number.data);
    }
    std::vector<Index> sizes;
    Index blocks = 0;
    inputs.reserve(count * per_item), outputs.reserve(count * made);
    for (size_t item = 0; item < count; item++) {
      for (size_t i = 0; i < per_item; i++) {
        const auto x = call.input(first + item * per_item + i);
        require(x && (i == 0 || x.sizes == sizes), "tensors of an item have one shape");
        sizes = x.sizes;
        inputs.push_back(x.data);
      }
      Index size = 0;
      for (size_t i = 0; i < made; i++) {
        auto y = call.output(item * made + i, sizes);
        outputs.push_back(y.data);
        size = y.size();
      }
      items.push_back({blocks, size, inputs.data() + item * per_item, outputs.data() + item * made});
      blocks += ceiling(size, kBlock);
    }
    if (is_guarded && !is_finite(call.input(given))) return;
    split(call, blocks, 16, [&](Index begin, Index end) { run(items, values, begin, end); });
  }

  void run(const std::vector<Item>& items, const std::vector<const float*>& values, Index begin, Index end) const {
    float* memory = scratch(3, (place_count + tensors) * kBlock);
    std::vector<const float*> operands(values);
    operands.resize(values.size() + static_cast<size_t>(tensors));
    for (Index place : places) operands.push_back(memory + place * kBlock);
    const auto next = [](Index block, const Item& item) { return block < item.first_block; };
    auto item = std::upper_bound(items.begin(), items.end(), begin, next) - 1;
    for (Index block = begin; block < end; block++) {
      while (item + 1 != items.end() && (item + 1)->first_block <= block) ++item;
      const Index offset = (block - item->first_block) * kBlock, count = std::min(kBlock, item->size - offset);
      if (run_whole != nullptr) {
        run_whole(values.data(), item->inputs, item->outputs, offset, count);
        continue;
      }
      for (size_t i = 0; i < static_cast<size_t>(tensors); i++) {
        const float* from = item->inputs[i] + offset;
        if (count < kBlock) {  // vectors may read on
          float* copy = memory + (place_count + static_cast<Index>(i)) * kBlock;
          std::copy(from, from + count, copy);
          std::fill(copy + count, copy + ceiling(count, kLanes) * kLanes, 0.f);
          from = copy;
        }
        operands[values.size() + i] = from;
      }
      execute(operands, memory, count);
      for (size_t i = 0; i < results.size(); i++) {  // after all is read: it may be the memory of an input
        const float* from = operands[static_cast<size_t>(results[i])];
        std::copy(from, from + count, item->outputs[i] + offset);
      }
    }
  }

  void execute(const std::vector<const float*>& operands, float* memory, Index count) const {
    for (size_t i = 0; i < instructions.size(); i++) {
      auto [a, b, c] = instructions[i].operands;
      if (instructions[i].operation == kWhere) a = b = *operands[static_cast<size_t>(a)] != 0 ? b : c;
      const Step step = find_step(instructions[i].operation, a < numbers, b < numbers,
                                  std::make_integer_sequence<int, kOperations>());
      step(operands[static_cast<size_t>(a)], operands[static_cast<size_t>(b)], memory + places[i] * kBlock, count);
    }
  }

  Index numbers, tensors;
  bool is_guarded;
  std::vector<Index> results;
  std::vector<Instruction> instructions;
  RunWhole run_whole;  // if it is one of the usual ones
  std::vector<Index> places;  // of what instructions give
  Index place_count;
};

}  // namespace ONWARD_ISA
}  // namespace onward
