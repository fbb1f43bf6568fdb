"""Pictures of what a network looks at: class activation maps, and the affinities of its LightNL blocks.

maps, logits = autonl.cam.class_activation_map(model, images, classes)
"""

from autonl.cam.affinity import Affinities, affinities, affinity_row, lightnl_blocks
from autonl.cam.maps import ClassMaps, class_activation_map

__all__ = ["Affinities", "ClassMaps", "affinities", "affinity_row", "class_activation_map", "lightnl_blocks"]
