"""What a network is, as data. Standard library and YAML only: no torch."""
