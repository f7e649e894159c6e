"""The part of the self-test that runs in its ranks: small jobs of Megatron, and their state.

The comparison shares no code with the loader under test: it takes names and positions of parameters from Megatron's own
`sharded_state_dict`.
"""
