"""Semantic segmentation: a classifier as the backbone of DeepLabv3."""
