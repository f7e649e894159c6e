"""The implementation of `zero_strict_state_dict`: gathers and loads state of ColossalAI's wrappers."""
