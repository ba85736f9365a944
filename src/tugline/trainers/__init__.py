"""Trainers, which turn trajectories into new weights. This package may import torch."""
