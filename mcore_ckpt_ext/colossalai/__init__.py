"""The implementation of `zero_strict_state_dict`: gathers and loads the state of ColossalAI's wrappers."""
