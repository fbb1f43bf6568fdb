// The operator in OpenVINO, an extension: core.add_extension(LIBRARY).
#include <memory>
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "lightnl.h"

namespace {

// Inputs: x (N, H, W, C), taps (9, C), bias (C), and a shortcut (N, H, W, C) where there is one.
class LightNL : public ov::op::Op {
 public:
  OPENVINO_OP("LightNL", "autonl");

  LightNL() = default;
  LightNL(const ov::OutputVector& inputs, std::int64_t compact, std::int64_t stride, float energy_eps)
      : Op(inputs), compact(compact), stride(stride), energy_eps(energy_eps) {
    constructor_validate_and_infer_types();
  }

  void validate_and_infer_types() override {
    set_output_type(0, get_input_element_type(0), get_input_partial_shape(0));
  }

  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    return std::make_shared<LightNL>(inputs, compact, stride, energy_eps);
  }

  bool visit_attributes(ov::AttributeVisitor& visitor) override {
    visitor.on_attribute("compact", compact);
    visitor.on_attribute("stride", stride);
    visitor.on_attribute("energy_eps", energy_eps);
    return true;
  }

  bool has_evaluate() const override { return get_input_element_type(0) == ov::element::f32; }

  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    const ov::Shape shape = inputs[0].get_shape();
    outputs[0].set_shape(shape);
    const autonl::Map map = {
        std::ptrdiff_t(shape[1]), std::ptrdiff_t(shape[2]), std::ptrdiff_t(shape[3]), compact, stride, energy_eps};
    const std::size_t image = shape[1] * shape[2] * shape[3];
    for (std::size_t start = 0; start < shape[0] * image; start += image)
      autonl::lightnl(
          inputs[0].data<float>() + start, inputs[1].data<float>(), inputs[2].data<float>(),
          inputs.size() > 3 ? inputs[3].data<float>() + start : nullptr, outputs[0].data<float>() + start, map);
    return true;
  }

 private:
  std::int64_t compact = 1, stride = 1;
  float energy_eps = 0;
};

}  // namespace

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<LightNL>>()}));
