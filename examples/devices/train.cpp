// Trains on digits with the C API of ONNX Runtime alone:
//
//     python digits.py write
//     ln -s PATH/libonnxruntime.so.* libonnxruntime.so.1     # in site-packages/onnxruntime/capi
//     g++ -std=c++17 -O2 train.cpp -o train libonnxruntime.so.1 -Wl,-rpath,'$ORIGIN'
//     ./train lowered 100
//     python digits.py read
//
// The folder `lowered` has the output of `onward lower --all`, and samples as raw numbers: image.bin, labels.bin.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "runtime.h"

namespace {

constexpr int64_t kBatch = 32, kPixels = 64;

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class Number>
std::vector<Number> numbers(const std::string& path) {
  const std::string bytes = read(path);
  const auto* first = reinterpret_cast<const Number*>(bytes.data());
  return {first, first + bytes.size() / sizeof(Number)};
}

// Reads the output that replaces each state from the contract: "update": {"fc1.weight": "fc1.weight/new", ...}
std::map<std::string, std::string> update_in(const std::string& contract) {
  size_t at = contract.find('{', contract.find("\"update\""));
  auto text = [&] {
    std::string result;
    for (at++; contract[at] != '"'; at++) result += contract[at] == '\\' ? contract[++at] : contract[at];
    at++;
    return result;
  };
  std::map<std::string, std::string> pairs;
  while ((at = contract.find_first_of("\"}", at)) != std::string::npos && contract[at] == '"') {
    std::string state = text();
    at = contract.find('"', at);
    pairs[state] = text();
  }
  return pairs;
}

// Writes state by name as a .safetensors file: a JSON header, then the numbers.
void write_state(const std::string& path, const std::map<std::string, ort::Tensor>& state) {
  const std::map<int, std::pair<const char*, size_t>> types = {
      {ort::kFloat, {"F32", 4}}, {ort::kInt64, {"I64", 8}}, {ort::kDouble, {"F64", 8}}};
  std::string header = "{", body;
  for (const auto& [name, tensor] : state) {
    const auto [type, size] = types.at(tensor.type());
    size_t bytes = size;
    std::string shape;
    for (int64_t dim : tensor.shape()) {
      bytes *= static_cast<size_t>(dim);
      shape += (shape.empty() ? "" : ",") + std::to_string(dim);
    }
    const std::string offsets = std::to_string(body.size()) + "," + std::to_string(body.size() + bytes);
    header += (header.size() > 1 ? ",\"" : "\"") + name + "\":{\"dtype\":\"" + type + "\",\"shape\":[" + shape + "]," +
              "\"data_offsets\":[" + offsets + "]}";
    body.append(static_cast<const char*>(tensor.data()), bytes);
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length) << header << body;
}

void train(const std::string& folder, int steps) {
  const ort::Session step(folder + "/step.onnx"), start(folder + "/state.onnx");
  const auto update = update_in(read(folder + "/step.json"));
  std::vector<float> image = numbers<float>(folder + "/image.bin");
  std::vector<int64_t> labels = numbers<int64_t>(folder + "/labels.bin");
  const int64_t batches = static_cast<int64_t>(labels.size()) / kBatch;

  std::map<std::string, ort::Tensor> state;
  auto initial = start.run({});
  for (size_t at = 0; at < initial.size(); at++) state.emplace(start.outputs[at], std::move(initial[at]));

  for (int number = 0; number < steps; number++) {
    const int64_t first = number % batches * kBatch;
    std::map<std::string, ort::Tensor> batch;
    const size_t bytes = kBatch * kPixels * sizeof(float);
    batch.emplace("image", ort::Tensor::over(&image[first * kPixels], bytes, {kBatch, kPixels}, ort::kFloat));
    batch.emplace("labels", ort::Tensor::over(&labels[first], kBatch * sizeof(int64_t), {kBatch}, ort::kInt64));

    std::vector<const ort::Tensor*> inputs;
    for (const auto& name : step.inputs) inputs.push_back(batch.count(name) ? &batch.at(name) : &state.at(name));
    auto results = step.run(inputs);

    std::map<std::string, size_t> position;
    for (size_t at = 0; at < step.outputs.size(); at++) position[step.outputs[at]] = at;
    std::printf("%.9g\n", *static_cast<const float*>(results[position.at("loss")].data()));
    for (const auto& [name, output] : update) state.at(name) = std::move(results[position.at(output)]);
  }
  write_state(folder + "/trained.safetensors", state);
}

}  // namespace

int main(int count, char** arguments) try {
  train(count > 1 ? arguments[1] : "lowered", count > 2 ? std::atoi(arguments[2]) : 100);
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
