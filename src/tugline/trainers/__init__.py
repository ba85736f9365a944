"""Trainers turn trajectories into new weights. One folder each; torch is allowed here."""
