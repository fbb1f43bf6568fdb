// The operator in ONNX Runtime: session_options.register_custom_ops_library(LIBRARY).
//
// ONNX Runtime's packages for Python come without its C header. What is used of it is declared here: functions by their
// places in its table, to which every release only adds behind, and the first fields of its description of an operator.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "lightnl.h"

namespace {

struct Api {
  void* functions[100];
};

struct ApiBase {
  const Api* (*get)(std::uint32_t version);
  const char* (*version)();
};

// A function of the table that returns null, or a status that has to be released.
template <int PLACE, class... Arguments>
void call(const Api* api, Arguments... arguments) {
  void* status = reinterpret_cast<void* (*)(Arguments...)>(api->functions[PLACE])(arguments...);
  if (!status) return;
  const std::string message = reinterpret_cast<const char* (*)(void*)>(api->functions[2])(status);
  reinterpret_cast<void (*)(void*)>(api->functions[93])(status);
  throw std::runtime_error(message);
}

constexpr int CREATE_DOMAIN = 26, ADD_TO_DOMAIN = 27, ADD_DOMAIN = 28, TENSOR_DATA = 51, DIMENSIONS = 62, SHAPE = 65,
              FLOAT_ATTRIBUTE = 85, INTEGER_ATTRIBUTE = 86, INPUT = 90, OUTPUT = 91, RELEASE_SHAPE = 99;
constexpr std::uint32_t API = 8;  // the first with optional inputs
constexpr int FLOATS = 1, REQUIRED = 0, OPTIONAL = 1;

struct Operator {
  std::uint32_t version;
  void* (*create)(const Operator*, const Api*, const void* info);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);
  int (*input_type)(const Operator*, std::size_t);
  std::size_t (*inputs)(const Operator*);
  int (*output_type)(const Operator*, std::size_t);
  std::size_t (*outputs)(const Operator*);
  void (*compute)(void* kernel, void* context);
  void (*destroy)(void* kernel);
  int (*input_kind)(const Operator*, std::size_t);
  int (*output_kind)(const Operator*, std::size_t);
  void* later_versions[32];
};

struct Kernel {
  const Api* api;
  std::int64_t compact, stride;
  float energy_eps;
};

void* create(const Operator*, const Api* api, const void* info) {
  Kernel kernel = {api, 0, 0, 0};
  call<INTEGER_ATTRIBUTE>(api, info, "compact", &kernel.compact);
  call<INTEGER_ATTRIBUTE>(api, info, "stride", &kernel.stride);
  call<FLOAT_ATTRIBUTE>(api, info, "energy_eps", &kernel.energy_eps);
  return new Kernel(kernel);
}

float* data(const Api* api, void* value) {
  void* found = nullptr;
  if (value) call<TENSOR_DATA>(api, value, &found);
  return static_cast<float*>(found);
}

void compute(void* kernel, void* context) {
  const auto& [api, compact, stride, energy_eps] = *static_cast<Kernel*>(kernel);
  void* values[4];  // x (N, H, W, C), taps (9, C), bias (C), and a shortcut (N, H, W, C) or null
  for (std::size_t i = 0; i < 4; ++i) call<INPUT>(api, context, i, &values[i]);
  void* shape = nullptr;
  std::int64_t sizes[4];
  call<SHAPE>(api, values[0], &shape);
  call<DIMENSIONS>(api, shape, &sizes[0], std::size_t(4));
  reinterpret_cast<void (*)(void*)>(api->functions[RELEASE_SHAPE])(shape);
  void* out = nullptr;
  call<OUTPUT>(api, context, std::size_t(0), &sizes[0], std::size_t(4), &out);

  const autonl::Map map = {sizes[1], sizes[2], sizes[3], compact, stride, energy_eps};
  const std::int64_t image = sizes[1] * sizes[2] * sizes[3];
  const float *x = data(api, values[0]), *taps = data(api, values[1]), *bias = data(api, values[2]);
  const float* shortcut = data(api, values[3]);
  float* z = data(api, out);
  for (std::int64_t start = 0; start < sizes[0] * image; start += image)
    autonl::lightnl(x + start, taps, bias, shortcut ? shortcut + start : nullptr, z + start, map);
}

const Operator LIGHTNL = {
    API,
    create,
    [](const Operator*) { return "LightNL"; },
    [](const Operator*) -> const char* { return nullptr; },  // the CPU
    [](const Operator*, std::size_t) { return FLOATS; },
    [](const Operator*) { return std::size_t(4); },
    [](const Operator*, std::size_t) { return FLOATS; },
    [](const Operator*) { return std::size_t(1); },
    compute,
    [](void* kernel) { delete static_cast<Kernel*>(kernel); },
    [](const Operator*, std::size_t input) { return input == 3 ? OPTIONAL : REQUIRED; },
    [](const Operator*, std::size_t) { return REQUIRED; },
    {},
};

}  // namespace

extern "C" void* RegisterCustomOps(void* options, const ApiBase* base) {
  const Api* api = base->get(API);
  void* domain = nullptr;  // lives as long as the process: sessions may
  call<CREATE_DOMAIN>(api, "autonl", &domain);
  call<ADD_TO_DOMAIN>(api, domain, &LIGHTNL);
  call<ADD_DOMAIN>(api, options, domain);
  return nullptr;
}
