// The door: ONNX Runtime calls `RegisterCustomOps`, and gets the operators for the instructions of this machine.
#include <cstdlib>
#include <new>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "operators.h"

#if defined(__GLIBCXX__)
namespace std {
// Vectors ask for it since GCC 11. It is here, so that the libraries of older systems will do.
void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
#endif

namespace onward {

namespace baseline { std::vector<Operator> operators(); }
#if defined(__x86_64__)
namespace avx2 { std::vector<Operator> operators(); }
namespace avx512 { std::vector<Operator> operators(); }
#endif

namespace {

#if defined(__x86_64__)
// What the processor has, if the system also keeps the registers for it. Not every compiler brings functions for that.
bool has_bits(unsigned registers, unsigned bits) { return (registers & bits) == bits; }

const char* instructions() {
  constexpr unsigned kFma = 1u << 12, kSaves = 1u << 27, kAvx = 1u << 28;  // of leaf 1
  constexpr unsigned kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // of leaf 7: f, dq, bw, vl
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has_bits(c, kFma | kSaves | kAvx)) return "baseline";
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has_bits(b, kAvx2)) return "baseline";
  unsigned saved = 0, high = 0;
  asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!has_bits(saved, 0x6)) return "baseline";
  return has_bits(b, kAvx512) && has_bits(saved, 0xe6) ? "avx512" : "avx2";
}
#else
const char* instructions() { return "baseline"; }
#endif

// The environment may ask for less than there is: for tests.
std::vector<Operator> choose_operators() {
  const char* wanted = std::getenv("ONWARD_KERNELS_INSTRUCTIONS");
  const std::string found = instructions(), chosen = wanted ? wanted : found;
#if defined(__x86_64__)
  if (chosen == "avx512" && found == "avx512") return avx512::operators();
  if (chosen != "baseline" && found != "baseline") return avx2::operators();
#endif
  return baseline::operators();
}

struct Registered : CustomOp {
  Operator row;
  bool is_variadic_in, is_variadic_out;
};

const Registered& of(const CustomOp* op) { return *static_cast<const Registered*>(op); }

struct Running {
  Api* api;
  std::unique_ptr<Kernel> kernel;
};

template <class Function>
Status* guarded(Api* api, const Function& function) {
  try {
    function();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return CreateStatus::of(api)(1, "bad_alloc: a kernel of onward found no memory");
  } catch (const std::exception& error) {
    return CreateStatus::of(api)(1, error.what());
  }
}

const Port& port(const std::vector<Port>& ports, size_t index) { return ports[std::min(index, ports.size() - 1)]; }

Registered* registered(Operator row) {
  auto* op = new Registered();
  op->row = std::move(row);
  op->version = kApiVersion;
  op->name = [](const CustomOp* op) { return of(op).row.name; };
  op->provider = [](const CustomOp*) -> const char* { return nullptr; };
  op->input_type = [](const CustomOp* op, size_t i) -> int { return port(of(op).row.inputs, i).type; };
  op->input_count = [](const CustomOp* op) { return of(op).row.inputs.size(); };
  op->output_type = [](const CustomOp* op, size_t i) -> int { return port(of(op).row.outputs, i).type; };
  op->output_count = [](const CustomOp* op) { return of(op).row.outputs.size(); };
  op->input_presence = [](const CustomOp* op, size_t i) -> int { return port(of(op).row.inputs, i).presence; };
  op->output_presence = [](const CustomOp* op, size_t i) -> int { return port(of(op).row.outputs, i).presence; };
  op->input_memory = [](const CustomOp*, size_t) { return 0; };
  op->least_inputs = [](const CustomOp*) { return 1; };
  op->same_inputs = [](const CustomOp* op) { return of(op).row.inputs.back().type != kUndefined ? 1 : 0; };
  op->least_outputs = [](const CustomOp*) { return 1; };
  op->same_outputs = [](const CustomOp*) { return 1; };
  op->first_version = [](const CustomOp*) { return 1; };
  op->last_version = [](const CustomOp*) { return 1; };
  op->create_kernel_v2 = [](const CustomOp* op, Api* api, const KernelInfo* info, void** kernel) {
    return guarded(api, [&] { *kernel = new Running{api, of(op).row.make(Attributes(api, info))}; });
  };
  op->compute_v2 = [](void* kernel, KernelContext* context) {
    auto* running = static_cast<Running*>(kernel);
    return guarded(running->api, [&] { running->kernel->compute(Call(running->api, context)); });
  };
  op->destroy = [](void* kernel) { delete static_cast<Running*>(kernel); };
  return op;
}

}  // namespace

// ---- what operators.h declares ---------------------------------------------------------------------------------------

void Call::check(Status* status) const {
  if (status == nullptr) return;
  ReleaseStatus::of(api_)(status);
  throw std::runtime_error("ONNX Runtime refused what a kernel of onward asked for");
}

size_t Call::input_count() const {
  size_t count = 0;
  check(InputCount::of(api_)(context_, &count));
  return count;
}

size_t Call::output_count() const {
  size_t count = 0;
  check(OutputCount::of(api_)(context_, &count));
  return count;
}

template <class T>
Tensor<T> Call::read(size_t index) const {
  if (index >= input_count()) return {};
  const Value* value = nullptr;
  check(Input::of(api_)(context_, index, &value));
  if (value == nullptr) return {};
  Tensor<T> tensor;
  TensorInfo* info = nullptr;
  check(InfoOfTensor::of(api_)(value, &info));
  std::unique_ptr<TensorInfo, void (*)(TensorInfo*)> held(info, ReleaseInfo::of(api_));
  size_t rank = 0;
  check(DimensionCount::of(api_)(info, &rank));
  tensor.sizes.resize(rank);
  check(Dimensions::of(api_)(info, tensor.sizes.data(), rank));
  void* data = nullptr;
  check(TensorData::of(api_)(const_cast<Value*>(value), &data));
  tensor.data = static_cast<T*>(data);
  return tensor;
}

template Tensor<const float> Call::read(size_t) const;
template Tensor<const Index> Call::read(size_t) const;

Tensor<float> Call::output(size_t index, std::vector<Index> sizes) const {
  if (index >= output_count()) return {};
  Value* value = nullptr;
  check(Output::of(api_)(context_, index, sizes.data(), sizes.size(), &value));
  if (value == nullptr) return {};
  void* data = nullptr;
  check(TensorData::of(api_)(value, &data));
  return {static_cast<float*>(data), std::move(sizes)};
}

template <class Entry, class T>
T Attributes::one(const char* name, T otherwise) const {
  T value{};
  Status* status = Entry::of(api_)(info_, name, &value);
  if (status == nullptr) return value;
  ReleaseStatus::of(api_)(status);
  return otherwise;
}

Index Attributes::integer(const char* name, Index otherwise) const { return one<IntAttribute>(name, otherwise); }

float Attributes::number(const char* name, float otherwise) const { return one<FloatAttribute>(name, otherwise); }

std::vector<Index> Attributes::integers(const char* name, std::vector<Index> otherwise) const {
  size_t count = 0;
  Status* status = IntsAttribute::of(api_)(info_, name, nullptr, &count);
  if (status != nullptr) ReleaseStatus::of(api_)(status);
  if (status != nullptr || count == 0) return otherwise;
  std::vector<Index> values(count);
  status = IntsAttribute::of(api_)(info_, name, values.data(), &count);
  if (status == nullptr) return values;
  ReleaseStatus::of(api_)(status);
  return otherwise;
}

namespace {

struct Buffer {
  float* data = nullptr;
  Index count = 0;
  ~Buffer() { std::free(data); }
};
constexpr int kSlots = 8;
thread_local Buffer buffers[kSlots];

}  // namespace

float* scratch(int slot, Index count) {
  Buffer& buffer = buffers[slot];
  if (buffer.count < count) {
    std::free(buffer.data);
    buffer.count = (count + kLine - 1) / kLine * kLine;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(buffer.count) * sizeof(float)));
    if (buffer.data == nullptr) {
      buffer.count = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.data;
}

}  // namespace onward

extern "C" __attribute__((visibility("default"))) onward::Status* RegisterCustomOps(
    onward::SessionOptions* options, const onward::ApiBase* base) {
  using namespace onward;
  Api* api = base->get_api(kApiVersion);
  if (api == nullptr) return CreateStatus::of(base->get_api(1))(1, "this ONNX Runtime is too old for the kernels");
  // Operators live as long as the process: sessions keep pointers to them.
  static const std::vector<Registered*> operators = [] {
    std::vector<Registered*> made;
    for (Operator& row : choose_operators()) made.push_back(registered(std::move(row)));
    return made;
  }();
  OpDomain* domain = nullptr;
  if (Status* status = CreateDomain::of(api)("onward.kernels", &domain)) return status;
  for (Registered* op : operators)
    if (Status* status = AddToDomain::of(api)(domain, op)) return status;
  return AddDomain::of(api)(options, domain);
}

extern "C" __attribute__((visibility("default"))) const char* onward_instructions() { return onward::instructions(); }
