"""The operators of Table 2 against their equations with explicit matrices."""

import pytest
import torch

from autonl import AutoNLError
from autonl.arch.spec import OPERATORS
from autonl.nn.nonlocal_zoo import create_operator

CHANNELS = 12


def rows(x):
    return x.flatten(2).mT  # (N, HW, C)


def equation(operator, block, x):
    """What stands before W_z and the BN, positions as rows, from the paper's equations."""
    positions = x.shape[-2] * x.shape[-1]
    if operator == "eq9":
        x_s = rows(x[:, :, ::2, ::2])
        return rows(x)[..., :3] @ x_s[..., :3].mT @ x_s / positions
    g = rows(block.g(x))
    theta = rows(block.theta(x)) if operator in ("wang", "levi", "zhu", "eq3") else g
    phi = rows(block.phi(x)) if operator in ("wang", "levi", "zhu") else theta
    if operator == "zhu":
        pooled = [
            torch.cat(
                [rows(torch.nn.functional.adaptive_avg_pool2d(m, grid)) for grid in (1, 3, 6, 8)],
                dim=1,
            )
            for m in (block.phi(x), block.g(x))
        ]
        return theta @ pooled[0].mT @ pooled[1] / 110
    return (theta @ phi.mT) @ g / positions


@pytest.mark.parametrize("operator", ["wang", "levi", "zhu", "eq3", "eq5", "eq7", "eq9"])
@pytest.mark.parametrize(("height", "width"), [(9, 13), (3, 2)])
def test_operator_equals_its_equation(operator, height, width):
    torch.manual_seed(0)
    block = create_operator(operator, CHANNELS, 0.25, 2).double().eval()
    torch.nn.init.normal_(block.bn.weight)
    x = torch.randn(2, CHANNELS, height, width, dtype=torch.float64)
    y = equation(operator, block, x).mT.unflatten(2, (height, width))
    expected = block.bn(block.w_z(y)) + x
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("operator", OPERATORS)
def test_identity_at_birth_and_trainable(operator):
    torch.manual_seed(0)
    block = create_operator(operator, CHANNELS, 0.25, 2)
    x = torch.randn(2, CHANNELS, 8, 8)
    assert torch.equal(block(x), x)
    block(x).square().sum().backward()
    assert block.bn.weight.grad.abs().sum() > 0


def test_an_unknown_operator_is_refused():
    with pytest.raises(AutoNLError, match="unknown operator 'eq4'; did you mean eq"):
        create_operator("eq4", 8, 0.25, 1)
