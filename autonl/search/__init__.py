"""The search: where LightNL pays and how compact it may be, with kernel, expansion, depth and SE."""
