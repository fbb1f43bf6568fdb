"""autonl: efficient vision networks that know where non-local context pays.

The names below are the public interface; everything else may change.
"""

from autonl.arch.codec import read_arch, write_arch
from autonl.arch.macs import count_macs, count_params
from autonl.arch.spec import ArchSpec, BlockSpec, LightNLSpec
from autonl.errors import AutoNLError
from autonl.export.deploy import deploy
from autonl.models import create_model, resolve
from autonl.nn.insertion import insert_lightnl
from autonl.nn.light_nonlocal import LightNL, freeze_association
from autonl.version import __version__
from autonl.weights import load

__all__ = [
    "ArchSpec",
    "AutoNLError",
    "BlockSpec",
    "LightNL",
    "LightNLSpec",
    "__version__",
    "count_macs",
    "count_params",
    "create_model",
    "deploy",
    "freeze_association",
    "insert_lightnl",
    "load",
    "read_arch",
    "resolve",
    "write_arch",
]
