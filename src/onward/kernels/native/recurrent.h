// Recurrent layers: the part that goes step by step, and its gradient. What does not depend on states is computed
// before, and after, for all steps at once. Sequences of a batch know nothing of each other, so that a task goes through
// all steps with a few of them, and never waits for another.
#pragma once
#include "functions.h"
#include "products.h"

namespace onward {
namespace ONWARD_ISA {

constexpr int kMostStates = 2;

// ---- some sequences at one step --------------------------------------------------------------------------------------

// Of each sequence there is a row: of as many numbers as there are units for a state, of a multiple for gates.
struct Moment {
  Index rows, units, time;
  const Index* lengths;  // of these sequences, if they have lengths of their own
  const float* before[kMostStates];

  bool goes_on(Index row) const { return lengths == nullptr || time < lengths[row]; }

  // Calls function(row, i, lanes) for the units of sequences that go on, a vector at a time.
  template <class Function>
  void each(const Function& function) const {
    for (Index row = 0; row < rows; row++)
      if (goes_on(row)) along(units, [&](Index i, auto lanes) { function(row, i, lanes); });
  }
};

struct Forward : Moment {
  const float *items, *bias;  // products with the inputs; a bias of the units
  float* after[kMostStates];
  float* kept;      // for the gradient
  float* products;  // with states, rows being whole vectors
};

struct Backward : Moment {
  const float* after[kMostStates];
  const float* kept;
  float* ditems;
  float* more;                 // what a cell has to say besides
  float* dstates[kMostStates];  // of what is after this step, then of what is before it; rows being whole vectors
  Index wide;
};

// Recurrent weights, a row for each unit of each gate: those of the first product of a step, and of a second one.
struct RecurrentWeights {
  Packed first, second;
};

// ---- cells -----------------------------------------------------------------------------------------------------------

// Each has the number of states, the gates in all and in the first product, and multiples of the units: what is kept
// for the gradient, and what the gradient has to say besides.

struct RnnCell {  // h = tanh(x + h R')
  static constexpr int kStates = 1, kGates = 1, kFirst = 1, kKept = 0, kMore = 0;
  static constexpr bool kHasBias = false;

  static void advance(const Forward& s, const RecurrentWeights& w) {
    multiply({s.before[0], s.units, 1}, s.rows, w.first, s.products, false);
    const Index wide = w.first.width();
    s.each([&](Index row, Index i, auto lanes) {
      const Index at = row * s.units + i;
      put(s.after[0] + at, tanh(get(s.items + at, lanes) + get(s.products + row * wide + i, lanes)), lanes);
    });
  }

  static void pull_back(const Backward& s, const RecurrentWeights& w) {
    s.each([&](Index row, Index i, auto lanes) {
      const Index at = row * s.units + i;
      float* dstate = s.dstates[0] + row * s.wide + i;
      const V h = get(s.after[0] + at, lanes);
      put(s.ditems + at, get(dstate, lanes) * (1.f - h * h), lanes);
      put(dstate, V{}, lanes);
    });
    multiply({s.ditems, s.units, 1}, s.rows, w.first, s.dstates[0], true);
  }
};

struct LstmCell {  // c = f c + i g, h = o tanh(c); gates are i, o, f, g
  static constexpr int kStates = 2, kGates = 4, kFirst = 4, kKept = 4, kMore = 0;
  static constexpr bool kHasBias = false;

  static void advance(const Forward& s, const RecurrentWeights& w) {
    multiply({s.before[0], s.units, 1}, s.rows, w.first, s.products, false);
    const Index n = s.units, wide = w.first.width();
    s.each([&](Index row, Index i, auto lanes) {
      const float *item = s.items + row * 4 * n + i, *product = s.products + row * wide + i;
      const auto sum = [&](Index gate) { return get(item + gate * n, lanes) + get(product + gate * n, lanes); };
      const V in = sigmoid(sum(0)), out = sigmoid(sum(1)), forget = sigmoid(sum(2)), candidate = tanh(sum(3));
      const V memory = forget * get(s.before[1] + row * n + i, lanes) + in * candidate;
      put(s.after[0] + row * n + i, out * tanh(memory), lanes);
      put(s.after[1] + row * n + i, memory, lanes);
      float* kept = s.kept + row * 4 * n + i;
      put(kept, in, lanes);
      put(kept + n, out, lanes);
      put(kept + 2 * n, forget, lanes);
      put(kept + 3 * n, candidate, lanes);
    });
  }

  static void pull_back(const Backward& s, const RecurrentWeights& w) {
    const Index n = s.units;
    s.each([&](Index row, Index i, auto lanes) {
      const float* kept = s.kept + row * 4 * n + i;
      const V in = get(kept, lanes), out = get(kept + n, lanes), forget = get(kept + 2 * n, lanes);
      const V candidate = get(kept + 3 * n, lanes), bent = tanh(get(s.after[1] + row * n + i, lanes));
      float *dstate = s.dstates[0] + row * s.wide + i, *dmemory = s.dstates[1] + row * s.wide + i;
      const V dh = get(dstate, lanes), dc = get(dmemory, lanes) + dh * out * (1.f - bent * bent);
      float* ditem = s.ditems + row * 4 * n + i;
      put(ditem, dc * candidate * (in * (1.f - in)), lanes);
      put(ditem + n, dh * bent * (out * (1.f - out)), lanes);
      put(ditem + 2 * n, dc * get(s.before[1] + row * n + i, lanes) * (forget * (1.f - forget)), lanes);
      put(ditem + 3 * n, dc * in * (1.f - candidate * candidate), lanes);
      put(dmemory, dc * forget, lanes);
      put(dstate, V{}, lanes);
    });
    multiply({s.ditems, 4 * n, 1}, s.rows, w.first, s.dstates[0], true);
  }
};

// h = n + z (h - n); gates are z, r, n. The candidate n resets the product with the state, bias included:
// n = tanh(x + r q), q = h R' + b. Besides, the gradient has that of products with states.
struct LinearGruCell {
  static constexpr int kStates = 1, kGates = 3, kFirst = 3, kKept = 4, kMore = 3;
  static constexpr bool kHasBias = true;

  static void advance(const Forward& s, const RecurrentWeights& w) {
    multiply({s.before[0], s.units, 1}, s.rows, w.first, s.products, false);
    const Index n = s.units, wide = w.first.width();
    s.each([&](Index row, Index i, auto lanes) {
      const float *item = s.items + row * 3 * n + i, *product = s.products + row * wide + i;
      const auto sum = [&](Index gate) { return get(item + gate * n, lanes) + get(product + gate * n, lanes); };
      const V update = sigmoid(sum(0)), reset = sigmoid(sum(1));
      const V inner = get(product + 2 * n, lanes) + (s.bias == nullptr ? V{} : get(s.bias + i, lanes));
      const V candidate = tanh(get(item + 2 * n, lanes) + reset * inner);
      const V before = get(s.before[0] + row * n + i, lanes);
      put(s.after[0] + row * n + i, candidate + update * (before - candidate), lanes);
      float* kept = s.kept + row * 4 * n + i;
      put(kept, update, lanes);
      put(kept + n, reset, lanes);
      put(kept + 2 * n, candidate, lanes);
      put(kept + 3 * n, inner, lanes);
    });
  }

  static void pull_back(const Backward& s, const RecurrentWeights& w) {
    const Index n = s.units;
    s.each([&](Index row, Index i, auto lanes) {
      const float* kept = s.kept + row * 4 * n + i;
      const V update = get(kept, lanes), reset = get(kept + n, lanes), candidate = get(kept + 2 * n, lanes);
      float *dstate = s.dstates[0] + row * s.wide + i, *ditem = s.ditems + row * 3 * n + i;
      const V dh = get(dstate, lanes), before = get(s.before[0] + row * n + i, lanes);
      const V dupdate = dh * (before - candidate) * (update * (1.f - update));
      const V dcandidate = dh * (1.f - update) * (1.f - candidate * candidate);
      const V dreset = dcandidate * get(kept + 3 * n, lanes) * (reset * (1.f - reset));
      put(ditem, dupdate, lanes);
      put(ditem + n, dreset, lanes);
      put(ditem + 2 * n, dcandidate, lanes);
      float* dproduct = s.more + row * 3 * n + i;
      put(dproduct, dupdate, lanes);
      put(dproduct + n, dreset, lanes);
      put(dproduct + 2 * n, dcandidate * reset, lanes);
      put(dstate, dh * update, lanes);
    });
    multiply({s.more, 3 * n, 1}, s.rows, w.first, s.dstates[0], true);
  }
};

// The same, but the candidate resets the state: n = tanh(x + (r h) R'). Besides, the gradient has the states r h.
struct GruCell {
  static constexpr int kStates = 1, kGates = 3, kFirst = 2, kKept = 3, kMore = 1;
  static constexpr bool kHasBias = false;

  static void advance(const Forward& s, const RecurrentWeights& w) {
    const Index n = s.units, wide = w.first.width();
    multiply({s.before[0], n, 1}, s.rows, w.first, s.products, false);
    s.each([&](Index row, Index i, auto lanes) {
      const float *item = s.items + row * 3 * n + i, *product = s.products + row * wide + i;
      const auto gate = [&](Index g) { return sigmoid(get(item + g * n, lanes) + get(product + g * n, lanes)); };
      float* kept = s.kept + row * 3 * n + i;
      const V reset = gate(1);
      put(kept, gate(0), lanes);
      put(kept + n, reset, lanes);
      put(s.after[0] + row * n + i, reset * get(s.before[0] + row * n + i, lanes), lanes);  // for the second product
    });
    multiply({s.after[0], n, 1}, s.rows, w.second, s.products, false);
    s.each([&](Index row, Index i, auto lanes) {
      float* kept = s.kept + row * 3 * n + i;
      const V candidate =
          tanh(get(s.items + (row * 3 + 2) * n + i, lanes) + get(s.products + row * w.second.width() + i, lanes));
      put(kept + 2 * n, candidate, lanes);
      const V before = get(s.before[0] + row * n + i, lanes);
      put(s.after[0] + row * n + i, candidate + get(kept, lanes) * (before - candidate), lanes);
    });
  }

  static void pull_back(const Backward& s, const RecurrentWeights& w) {
    const Index n = s.units;
    float* dreset_state = scratch(3, s.rows * s.wide);
    s.each([&](Index row, Index i, auto lanes) {
      const float* kept = s.kept + row * 3 * n + i;
      const V update = get(kept, lanes), reset = get(kept + n, lanes), candidate = get(kept + 2 * n, lanes);
      float *dstate = s.dstates[0] + row * s.wide + i, *ditem = s.ditems + row * 3 * n + i;
      const V dh = get(dstate, lanes), before = get(s.before[0] + row * n + i, lanes);
      put(ditem, dh * (before - candidate) * (update * (1.f - update)), lanes);
      put(ditem + 2 * n, dh * (1.f - update) * (1.f - candidate * candidate), lanes);
      put(dstate, dh * update, lanes);
      put(s.more + row * n + i, reset * before, lanes);
    });
    multiply({s.ditems + 2 * n, 3 * n, 1}, s.rows, w.second, dreset_state, false);
    s.each([&](Index row, Index i, auto lanes) {
      float* dstate = s.dstates[0] + row * s.wide + i;
      const V reset = get(s.kept + (row * 3 + 1) * n + i, lanes), before = get(s.before[0] + row * n + i, lanes);
      const V slope = get(dreset_state + row * s.wide + i, lanes);
      put(s.ditems + (row * 3 + 1) * n + i, slope * before * (reset * (1.f - reset)), lanes);
      put(dstate, get(dstate, lanes) + slope * reset, lanes);
    });
    multiply({s.ditems, 3 * n, 1}, s.rows, w.first, s.dstates[0], true);
  }
};

// ---- layers in one direction -----------------------------------------------------------------------------------------

template <class Cell>
struct RecurrentKernel : Kernel {
  explicit RecurrentKernel(const Attributes& a) : backwards(a.integer("backwards", 0) != 0) {}

  static constexpr size_t kStates = Cell::kStates;

  struct Sizes {
    Index steps, batch, units;
    const Index* lengths;
    std::vector<Index> of_steps(Index multiple) const { return {steps, batch, multiple * units}; }
    std::vector<Index> of_state() const { return {batch, units}; }
  };

  // A layer whose state has `units`, by the tensor of something that all steps have.
  static Sizes sizes_of(const Call& call, const Tensor<const float>& of_steps, Index units, size_t lengths_at) {
    require(of_steps.sizes.size() == 3, "a recurrent layer has steps, sequences and units");
    const auto lengths = call.indices(lengths_at);
    require(!lengths || lengths.size() == of_steps.sizes[1], "each sequence has a length");
    return {of_steps.sizes[0], of_steps.sizes[1], units, lengths.data};
  }

  static void require_weights(const Tensor<const float>& r, const Sizes& s) {
    require(r.sizes == std::vector<Index>{Cell::kGates * s.units, s.units}, "recurrent weights do not fit the states");
  }

  // The i-th step, in the order in which a layer goes through them.
  Index time(const Sizes& s, Index i) const { return backwards ? s.steps - 1 - i : i; }

  // Where a state is before the i-th step.
  const float* before(const Sizes& s, Index i, Index first, const float* initial, const float* every) const {
    return i == 0 ? initial + first * s.units : every + (time(s, i - 1) * s.batch + first) * s.units;
  }

  // Recurrent weights, packed by `pack_rows(rows of weights, how many there are, slot)`.
  template <class PackRows>
  static RecurrentWeights weights(const Tensor<const float>& r, const PackRows& pack_rows) {
    const Index units = r.sizes[1], first = Cell::kFirst * units;
    return {pack_rows(r.data, first, 0), pack_rows(r.data + first * units, r.sizes[0] - first, 1)};
  }

  template <class At>
  static Packed packed(const Call& call, Index columns, Index length, int slot, const At& at) {
    const Packed to{tiles_of(columns), 1, length, scratch(slot, Packed::size(columns, 1, length))};
    call.parallel(static_cast<Index>(to.tiles.size()), [&](Index tile) { pack(to, static_cast<size_t>(tile), at); });
    return to;
  }

  // Calls function(first, rows) for groups of sequences.
  template <class Function>
  static void each_group(const Call& call, const Sizes& s, const Function& function) {
    const Index groups = std::max(ceiling(s.batch, kMost), std::min(kTasks, ceiling(s.batch, kLeast)));
    call.parallel(groups, [&](Index i) {
      const Index first = s.batch * i / groups;
      function(first, s.batch * (i + 1) / groups - first);
    });
  }

  bool backwards;

 private:
  // Sequences of a task. The more there are, the less often weights come from caches; but threads want tasks.
  static constexpr Index kLeast = 4, kMost = 16, kTasks = 4;
};

template <class Cell>
struct Recurrent : RecurrentKernel<Cell> {  // items, r, initial states, bias, lengths -> all states, last states, kept
  using Base = RecurrentKernel<Cell>;
  using Base::Base;
  using Base::kStates;

  void compute(const Call& call) const override {
    const auto items = call.input(0), r = call.input(1);
    require(r.sizes.size() == 2, "recurrent weights are a matrix");
    Of of{Base::sizes_of(call, items, r.sizes[1], 2 + kStates + Cell::kHasBias)};
    Base::require_weights(r, of.s);
    require(items.sizes == of.s.of_steps(Cell::kGates), "gates do not fit the states of a recurrent layer");
    of.items = items.data;
    if (Cell::kHasBias) {
      const auto bias = call.input(2 + kStates);
      require(!bias || bias.size() == of.s.units, "a bias has a number for each unit");
      of.bias = bias.data;
    }
    for (size_t k = 0; k < kStates; k++) {
      const auto initial = call.input(2 + k);
      require(initial.sizes == of.s.of_state(), "an initial state does not fit the items of a recurrent layer");
      of.initial[k] = initial.data;
      of.every[k] = call.output(k, of.s.of_steps(1)).data;
      of.last[k] = call.output(kStates + k, of.s.of_state()).data;
    }
    if (Cell::kKept > 0) of.kept = call.output(2 * kStates, of.s.of_steps(Cell::kKept)).data;
    const Index units = of.s.units;
    const RecurrentWeights w = Base::weights(r, [&](const float* rows, Index count, int slot) {
      const auto transposed = [&](Index, Index k, Index column) { return rows[column * units + k]; };
      return Base::packed(call, count, units, slot, transposed);
    });
    Base::each_group(call, of.s, [&](Index first, Index rows) { advance(of, w, first, rows); });
  }

 private:
  struct Of {
    typename Base::Sizes s;
    const float *items, *bias, *initial[kMostStates];
    float *every[kMostStates], *last[kMostStates], *kept;
  };

  void advance(const Of& of, const RecurrentWeights& w, Index first, Index rows) const {
    const auto& s = of.s;
    Forward now{};
    now.rows = rows, now.units = s.units, now.bias = of.bias;
    now.lengths = s.lengths == nullptr ? nullptr : s.lengths + first;
    now.products = scratch(2, rows * std::max(w.first.width(), w.second.width()));
    for (Index i = 0; i < s.steps; i++) {
      now.time = this->time(s, i);
      const Index at = now.time * s.batch + first;
      now.items = of.items + at * Cell::kGates * s.units;
      now.kept = of.kept + at * Cell::kKept * s.units;
      for (size_t k = 0; k < kStates; k++) {
        now.before[k] = this->before(s, i, first, of.initial[k], of.every[k]);
        now.after[k] = of.every[k] + at * s.units;
      }
      Cell::advance(now, w);
      hold(now);
    }
    for (size_t k = 0; k < kStates; k++) {
      const float* from = this->before(s, s.steps, first, of.initial[k], of.every[k]);
      std::copy(from, from + rows * s.units, of.last[k] + first * s.units);
    }
  }

  // States of sequences that have ended stay as they are.
  static void hold(const Forward& now) {
    for (Index row = 0; row < now.rows; row++) {
      if (now.goes_on(row)) continue;
      for (size_t k = 0; k < kStates; k++) {
        const float* from = now.before[k] + row * now.units;
        std::copy(from, from + now.units, now.after[k] + row * now.units);
      }
    }
  }
};

// r, initial states, all states, kept, and of all hidden states and last states the gradients, lengths
//   -> the gradients of items and initial states, the hidden states before each step, and more
template <class Cell>
struct RecurrentGradient : RecurrentKernel<Cell> {
  using Base = RecurrentKernel<Cell>;
  using Base::Base;
  using Base::kStates;

  void compute(const Call& call) const override {
    constexpr size_t kDy = 1 + 2 * kStates + (Cell::kKept > 0);
    const auto r = call.input(0), hidden = call.input(1 + kStates), dy = call.input(kDy);
    Of of{Base::sizes_of(call, hidden, hidden.sizes.empty() ? 0 : hidden.sizes.back(), kDy + 1 + kStates)};
    Base::require_weights(r, of.s);
    require(!dy || dy.sizes == hidden.sizes, "a gradient has the shape of what it is of");
    of.dy = dy.data;
    for (size_t k = 0; k < kStates; k++) {
      const auto initial = call.input(1 + k), every = call.input(1 + kStates + k), dlast = call.input(kDy + 1 + k);
      require(initial.sizes == of.s.of_state() && every.sizes == hidden.sizes, "states of a recurrent layer differ");
      require(!dlast || dlast.sizes == initial.sizes, "a gradient has the shape of what it is of");
      of.initial[k] = initial.data, of.every[k] = every.data, of.dlast[k] = dlast.data;
      of.dinitial[k] = call.output(1 + k, initial.sizes).data;
    }
    if (Cell::kKept > 0) {
      const auto kept = call.input(1 + 2 * kStates);
      require(kept.sizes == of.s.of_steps(Cell::kKept), "what was kept does not fit a recurrent layer");
      of.kept = kept.data;
    }
    of.ditems = call.output(0, of.s.of_steps(Cell::kGates)).data;
    of.states = call.output(1 + kStates, hidden.sizes).data;
    if (Cell::kMore > 0) of.more = call.output(2 + kStates, of.s.of_steps(Cell::kMore)).data;
    const Index units = of.s.units;
    const RecurrentWeights w = Base::weights(r, [&](const float* rows, Index count, int slot) {
      const auto as_it_is = [&](Index, Index k, Index column) { return rows[k * units + column]; };
      return Base::packed(call, units, count, slot, as_it_is);
    });
    Base::each_group(call, of.s, [&](Index first, Index rows) { pull_back(of, w, first, rows); });
  }

 private:
  struct Of {
    typename Base::Sizes s;
    const float *dy, *initial[kMostStates], *every[kMostStates], *dlast[kMostStates], *kept;
    float *ditems, *dinitial[kMostStates], *states, *more;
  };

  void pull_back(const Of& of, const RecurrentWeights& w, Index first, Index rows) const {
    const auto& s = of.s;
    Backward now{};
    now.rows = rows, now.units = s.units, now.wide = w.first.width();
    now.lengths = s.lengths == nullptr ? nullptr : s.lengths + first;
    float* memory = scratch(2, Cell::kStates * rows * now.wide);
    std::fill(memory, memory + Cell::kStates * rows * now.wide, 0.f);
    for (size_t k = 0; k < kStates; k++, memory += rows * now.wide) {
      now.dstates[k] = memory;
      if (of.dlast[k] != nullptr) add(of.dlast[k] + first * s.units, now, memory);
    }
    for (Index i = s.steps - 1; i >= 0; i--) {
      now.time = this->time(s, i);
      const Index at = now.time * s.batch + first;
      now.kept = of.kept + at * Cell::kKept * s.units;
      now.ditems = of.ditems + at * Cell::kGates * s.units;
      now.more = of.more + at * Cell::kMore * s.units;
      for (size_t k = 0; k < kStates; k++) {
        now.before[k] = this->before(s, i, first, of.initial[k], of.every[k]);
        now.after[k] = of.every[k] + at * s.units;
      }
      std::copy(now.before[0], now.before[0] + rows * s.units, of.states + at * s.units);
      if (of.dy != nullptr) add(of.dy + at * s.units, now, now.dstates[0]);
      clear(now);
      Cell::pull_back(now, w);
    }
    for (size_t k = 0; k < kStates; k++)
      for (Index row = 0; row < rows; row++) {
        const float* from = now.dstates[k] + row * now.wide;
        std::copy(from, from + s.units, of.dinitial[k] + (first + row) * s.units);
      }
  }

  static void add(const float* from, const Backward& now, float* to) {
    for (Index row = 0; row < now.rows; row++)
      for (Index i = 0; i < now.units; i++) to[row * now.wide + i] += from[row * now.units + i];
  }

  // Of sequences that have ended there is nothing to say but what goes through.
  static void clear(const Backward& now) {
    const Index gates = Cell::kGates * now.units, more = Cell::kMore * now.units;
    for (Index row = 0; row < now.rows; row++) {
      if (now.goes_on(row)) continue;
      std::fill(now.ditems + row * gates, now.ditems + (row + 1) * gates, 0.f);
      std::fill(now.more + row * more, now.more + (row + 1) * more, 0.f);
    }
  }
};

}  // namespace ONWARD_ISA
}  // namespace onward
