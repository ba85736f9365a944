"""A backend of Triton that compiles nothing; its interpreter needs one that is active."""
