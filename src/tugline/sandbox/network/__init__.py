"""The ways out of a box, and nothing beside them."""
